"""Trainings and deaths of the tests with Accelerate."""

from __future__ import annotations

from typing import Any

from memckpt.compression import HalfPrecision, PowerSGD, Quantized8, RandomK, TopK
from tests.support.trainings.accelerate_training import Case, Kill

PLAIN = Case("plain")
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
DISPATCH = {"dispatch_batches": True}
STATEFUL = {"use_stateful_dataloader": True}

#: One run that is killed at each of these: each process counts from its own start. 11 batches an epoch, 3 epochs.
ONE_AFTER_ANOTHER: list[Kill] = [
    ("batch", 1),
    ("stepped", 1),
    ("commit", 1),
    ("committed", 1),
    ("batch", 2),
    ("backward", 4),
    ("commit", 2),
    ("committed", 5),  # the last batch of the epoch
    ("epoch end", 1),
    ("evaluation", 1),
    ("evaluated", 1),
    ("batch", 1),
    ("committed", 1),
    ("stepped", 10),
    ("epoch end", 1),
    ("committed", 11),
    ("end", 1),
]
#: The same places, for runs that are killed once.
POINTS: list[Kill] = [
    *[
        (place, visit)
        for place in ("batch", "backward", "stepped", "commit", "committed")
        for visit in (1, 2, 10, 11, 12)
    ],
    *[(place, visit) for place in ("epoch end", "evaluation", "evaluated") for visit in (1, 2, 3)],
    ("committed", 33),
    ("end", 1),
]
#: In the middle of an epoch, after one, and in the first batches of the next. Reached with any accumulation.
BRIEFLY: list[Kill] = [("backward", 5), ("epoch end", 1), ("batch", 2)]
ALL_ALONG: list[Kill] = [
    ("backward", 5),
    ("committed", 6),
    ("epoch end", 1),
    ("evaluated", 1),
    ("batch", 2),
    ("commit", 2),
    ("stepped", 2),
    ("committed", 3),
    ("evaluation", 1),
    ("end", 1),
]

CASES = [
    Case("dispatch", samples=46, loading=DISPATCH),
    Case("accumulate", samples=42, accumulate=3),
    Case("persistent_workers", loader=PERSISTENT),
    Case("stateful", loading=STATEFUL),
    Case("stateful_evaluation", loading=STATEFUL, evaluate_every=4, evaluation_loader={}),
    Case("stateful_evaluation_elsewhere", loading=STATEFUL, evaluate_every=4, evaluation_loader={"elsewhere": True}),
    Case("scaler", scaler=True),
    Case("evaluated_inside", evaluate_every=4),
    Case("evaluation_loader", evaluate_every=4, evaluation_loader={}),
    Case("limited", limit=7),
    Case("two_loaders", two=True),
    Case("save_state", saves=True),
]
MORE_CASES = [
    PLAIN,
    Case("seedable", loading={"use_seedable_sampler": True}),
    Case("not_seedable", loading={"use_seedable_sampler": False}),
    Case("uneven", samples=42),
    Case("split", loading={"split_batches": True}),
    Case("accumulate_seedable", samples=42, accumulate=3, loading={"use_seedable_sampler": True}),
    Case("workers", loader={"num_workers": 2}),
    Case("stateful_seedable", loading={**STATEFUL, "use_seedable_sampler": True}),
    Case("stateful_own", loading=STATEFUL, own_loader=True),
    Case("stateful_workers", loading=STATEFUL, loader={"num_workers": 2}),
    Case("stateful_persistent", loading=STATEFUL, loader=PERSISTENT),
    Case("evaluation_workers", evaluate_every=4, evaluation_loader=PERSISTENT),
    Case("bf16", accelerator={"mixed_precision": "bf16"}),
    Case("limited_persistent", limit=7, loader=PERSISTENT),
    Case("stream", stream=True),
    Case("stream_workers", stream=True, loader={"num_workers": 2}),
    Case("drop_last", samples=42, loader={"drop_last": True}),
    Case("rng_types", accelerator={"rng_types": ["torch", "generator"]}),
]

#: Two processes: 5 or 6 batches an epoch each.
RANKED = [
    Case("uneven", samples=42),
    Case("dispatch_padded", samples=43, loading=DISPATCH),
    Case("fsdp2", cut="fsdp2"),
]
MORE_RANKED = [
    PLAIN,
    Case("seedable", loading={"use_seedable_sampler": True}),
    Case("dispatch", samples=46, loading=DISPATCH),
    Case("dispatch_workers", samples=43, loading=DISPATCH, loader=PERSISTENT),
    Case("dispatch_split", samples=43, loading={**DISPATCH, "split_batches": True}),
    Case("dispatch_stateful", samples=43, loading={**DISPATCH, **STATEFUL}),
    Case("split", loading={"split_batches": True}),
    Case("not_evened", samples=40, loading={"even_batches": False}),
    Case("accumulate", samples=42, accumulate=2),
    Case("persistent_workers", loader=PERSISTENT),
    Case("stateful", loading=STATEFUL),
    Case("stream", stream=True),
    Case("rng_types", accelerator={"rng_types": ["torch", "generator"]}),
    Case("limited", samples=43, limit=4),
    Case("fsdp2_accumulate", samples=42, accumulate=2, cut="fsdp2"),
    Case("fsdp2_bf16", accelerator={"mixed_precision": "bf16"}, cut="fsdp2"),
    Case("fsdp2_evaluated_inside", evaluate_every=2, cut="fsdp2"),
    Case("compressed_accumulate", samples=42, accumulate=2, compression=TopK(ratio=0.25, min_elements=16)),
    *(
        Case(f"scaler_{type(compression).__name__}", scaler=True, compression=compression)
        for compression in (
            TopK(ratio=0.25, min_elements=16),
            RandomK(ratio=0.25, min_elements=16),
            Quantized8(min_elements=16),
            PowerSGD(rank=1, min_elements=16),
            HalfPrecision(),
        )
    ),
    Case("compressed_evaluated_inside", evaluate_every=2, compression=RandomK(ratio=0.25, min_elements=16)),
    Case("fsdp1", cut="fsdp1"),
    Case("fsdp1_accumulate", samples=42, accumulate=2, cut="fsdp1"),
]
RANKED_KILLS: list[Kill] = [("backward", 3), ("committed", 3), ("epoch end", 1), ("batch", 2)]
