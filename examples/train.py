"""One training script for several experiments, configured with Hydra.

    python examples/train.py experiment=gpt_stdlib memckpt=durable resume=auto     # kill it, at any moment
    python examples/train.py experiment=gpt_stdlib memckpt=durable resume=auto     # it continues after the last step
    python examples/train.py experiment=digits_cnn resume=never memckpt.redo=lazy
    python examples/train.py experiment=digits_cnn model.width=8,16 --multirun     # each job is a run of its own

The run is in Hydra's output directory. Each experiment of `conf/` names that directory after itself (Hydra's
default contains the time), so the same command finds its run again. Only the lines marked with (*) are memckpt's.
"""

import sys
from pathlib import Path

import hydra
import lightning.pytorch as pl
from hydra.utils import instantiate
from omegaconf import DictConfig

import memckpt_hydra  # (*)
from lightning_memckpt import MemCheckpoint  # (*)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a script: finds examples/
from examples.common import PrintSteps


@hydra.main(version_base="1.3", config_path="../conf", config_name="config")
def main(cfg: DictConfig) -> None:
    run_dir, resume, config = memckpt_hydra.protection(cfg)  # (*)
    pl.seed_everything(cfg.seed, workers=True)
    trainer = instantiate(
        cfg.trainer,
        callbacks=[PrintSteps(), MemCheckpoint(run_dir, resume=resume, config=config)],  # (*)
        default_root_dir=run_dir,
    )
    trainer.fit(instantiate(cfg.model), instantiate(cfg.data))


if __name__ == "__main__":
    main()
