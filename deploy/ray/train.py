"""A training on a Ray cluster that continues after its last step when a worker or a node is lost.

    ray job submit --working-dir . -- python train.py --nodes 4 --run-dir /shared/runs/my-run

The agents run outside of Ray, one on each node, before this starts: docs/recipes/ray.md.
Edit: `loop`, and the resources of a node.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from examples import many_nodes  # your training: a function called by each worker, with a process group


def loop(config: dict[str, Any]) -> None:
    many_nodes.train(many_nodes.parse(config["arguments"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="on which there is a worker; spare ones not counted")
    parser.add_argument("--ray-results", required=True, metavar="PATH", help="where Ray notes the state of its run")
    args, for_training = parser.parse_known_args()

    ray.init(address="auto")
    trainer = TorchTrainer(
        loop,
        train_loop_config={"arguments": for_training},
        torch_config=TorchConfig(backend="gloo", timeout_s=120),  # "nccl" on GPUs
        scaling_config=ScalingConfig(
            num_workers=args.nodes,
            resources_per_worker={"CPU": 1},  # with GPUs: use_gpu=True, and a node's GPUs as several workers
            placement_strategy="STRICT_SPREAD",  # losing a node with two workers would be two losses
        ),
        run_config=RunConfig(
            name="my-run",
            storage_path=args.ray_results,
            failure_config=FailureConfig(max_failures=20),  # the default is 0
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
