"""Throughput of encoding records for peers, compared to ISA-L's own routine, and to a checksum and a copy."""

from __future__ import annotations

import statistics
from contextlib import closing

from benchmarks.harness.command import Options, run
from benchmarks.harness.report import Ratio
from benchmarks.workloads.stripes import Side, Source, sides_of
from memckpt.replication.coding.code import STRIPE_BYTES, Code

TITLE = "Erasure coding: stripes to pieces, and back from the pieces that take most work"
METHOD = f"""\
One thread, stripes of {STRIPE_BYTES >> 10} KiB of a source that is much larger than the caches, rates in GB/s of the
source. *encode*: pieces that the caller owns. *seal*: the same with checksums, the stripe's digest and
headers. *ISA-L*: its `ec_encode_data` on the same stripes where they lie, parity into one small buffer: it copies
nothing. *checksum and copy*: xxh3_128 of a stripe that was copied to `bytes`. *decode*: always the same last k pieces
of one stripe, which are in the caches, with checksums and digest verified. All sides take turns, each over the whole
source; medians of the rounds, and the median of the rounds' ratios."""

#: (k, m): striping, plain copies, and parity.
CODES = ((3, 1), (1, 3), (2, 2), (4, 2), (8, 2), (4, 3), (8, 4))

SIDES = ("encode", "seal", "ISA-L", "checksum and copy", "decode")


def take_turns(source: Source, sides: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    """Seconds of every side in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in sides if number % 2 else reversed(sides):
            seconds[name].append(source.time(sides[name]))
    return seconds


def main(options: Options) -> None:
    source = Source((16 if options.quick else 256) << 20)
    report = options.report(
        TITLE, METHOD, "k, m", *SIDES, "encode's time, of ISA-L's", "seal's time, of checksum and copy's"
    )
    report.notes.append(f"A source of {source.nbytes >> 20} MiB in stripes of {STRIPE_BYTES >> 10} KiB; GB/s.")
    for data, tolerate in CODES:
        with closing(Code(data, tolerate)) as code:
            try:
                sides = sides_of(code, source)
            except OSError as error:
                report.leave_out(f"k={data}, m={tolerate}", str(error))
                continue
            seconds = take_turns(source, sides, 3 if options.quick else 7)
        rates = {name: source.nbytes / statistics.median(each) / 1e9 for name, each in seconds.items()}
        ratios = [
            Ratio.of(list(zip(seconds[ours], seconds[other], strict=True))) if other in seconds else None
            for ours, other in (("encode", "ISA-L"), ("seal", "checksum and copy"))
        ]
        report.add(
            f"{data}, {tolerate}", *(f"{rates[name]:.2f}" if name in rates else "-" for name in SIDES),
            *(f"{each.ratio:.2f} +- {each.spread:.2f}" if each else "-" for each in ratios),
            data=data, tolerate=tolerate, gigabytes_per_second=rates, seconds=seconds,
        )  # fmt: skip
    report.write()


if __name__ == "__main__":
    run("encode", main)
