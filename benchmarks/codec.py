"""Speed and error of encoding tensors for slow links, beside copying them.

python benchmarks/codec.py --output rows.jsonl
python benchmarks/codec.py --device cuda --output rows.jsonl

Encoding, decoding and copying 64 MiB (512 MiB on a GPU) take turns. `of copy`: bytes read and
written per second, over those of the copy. The error is that of a sum of three ranks, over the norm
of the exact sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
from rows import Column, Kind, Row, Target, new_parser, report
from torch import Tensor

from poplar import ops
from poplar.ops import codec

RANKS = 3
SPEED = {"cpu": 0.5, "cuda": 0.7}
"""Least fraction of the bandwidth of a copy."""
BYTES = {8: 0.52, 4: 0.27}
"""Most bytes per byte of bf16, by bits."""
COLUMNS = (
    Column("dtype", "dtype"),
    Column("bits", "bits"),
    Column("threads", "threads"),
    Column("operators", "operators"),
    Column("copy, GB/s", "copy_gb_per_s", "{:.1f}"),
    Column("encode, of copy", "encode_of_copy", "{:.2f}"),
    Column("decode, of copy", "decode_of_copy", "{:.2f}"),
    Column("both, of copy", "both_of_copy", "{:.2f}"),
    Column("bytes, of bf16", "bytes_of_bf16", "{:.4f}"),
    Column("error, normal", "error_normal", "{:.4f}"),
    Column("error, Student t3", "error_student_t3", "{:.4f}"),
)


def main() -> None:
    """Measure all cases, or show saved rows."""
    parser = new_parser(__doc__, rounds=30, quick="1 MiB")
    parser.add_argument("--device", choices=SPEED, default="cpu")
    options = parser.parse_args()
    is_cpu = options.device == "cpu"
    numel = 1 << (18 if options.quick else 24 if is_cpu else 27)
    cases = product((torch.float32, torch.bfloat16), (8, 4), (1, 2) if is_cpu else (1,))
    rows = (measure(options.device, *case, numel, options.rounds) for case in cases)
    report(options, rows, Kind("codec", COLUMNS, targets))


def measure(
    device: str, dtype: torch.dtype, bits: int, threads: int, numel: int, rounds: int
) -> Row:
    """The row of one case."""
    torch.set_num_threads(threads)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    copied, decoded = torch.empty_like(values), torch.empty_like(values)
    codes = torch.empty(codec.encoded_bytes(numel, bits), dtype=torch.uint8, device=device)
    copy, encode, decode = (seconds_on_gpu if values.is_cuda else seconds_of)(
        (
            lambda: ops.copy_(copied, values),
            lambda: ops.encode_(codes, [values], [0], 0.5, bits=bits, first=0, key=1),
            lambda: ops.decode_sum_(decoded, [codes], bits=bits),
        ),
        rounds,
    )
    speed = 2 * values.nbytes / copy
    moved = values.nbytes + codes.nbytes
    figures: dict[str, Any] = {
        "copy_gb_per_s": speed / 1e9,
        "encode_of_copy": moved / encode / speed,
        "decode_of_copy": moved / decode / speed,
        "both_of_copy": 2 * moved / (encode + decode) / speed,
        "bytes_of_bf16": codes.nbytes / (2 * numel),
        "error_normal": error_of_sum(torch.distributions.Normal(0.0, 1.0), bits),
        "error_student_t3": error_of_sum(torch.distributions.StudentT(3.0), bits),
    }
    if values.is_cuda:
        figures["operators"] = ops.providers()["cuda"].name
    case = {
        "dtype": str(dtype).removeprefix("torch."),
        "bits": bits,
        "threads": threads,
        "numel": numel,
        "rounds": rounds,
    }
    return Row.of("codec", case, figures, device=device)


def seconds_of(calls: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The median seconds of each call; all take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            own.append(time.perf_counter() - start)
    return [median(own[1:]) for own in times]


def seconds_on_gpu(calls: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """The same, by the device's clock; each turn is ten calls, so that no gap is timed."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(1_000_000)  # the host is ahead when the first call begins
            start.record()
            for _ in range(10):
                call()
            end.record()
            end.synchronize()
            own.append(start.elapsed_time(end) / 1e4)
    return [median(own[1:]) for own in times]


def error_of_sum(distribution: torch.distributions.Distribution, bits: int) -> float:
    """The norm of the error of a sum of three ranks' values, over the norm of the sum."""
    torch.manual_seed(0)
    parts = distribution.sample(torch.Size((RANKS, 1 << 20)))
    received: list[Tensor] = []
    for rank, values in enumerate(parts):
        codes = torch.empty(codec.encoded_bytes(values.numel(), bits), dtype=torch.uint8)
        ops.encode_(codes, [values], [0], 1.0, bits=bits, first=0, key=rank)
        received.append(codes)
    total = torch.empty_like(parts[0])
    ops.decode_sum_(total, received, bits=bits)
    exact = parts.double().sum(0)
    return float((total - exact).norm() / exact.norm())


def targets(rows: Sequence[Row]) -> Iterator[Target]:
    """Bandwidth of encoding and decoding, and bytes on the wire."""
    for row in rows:
        where = "cuda" if row["device"].startswith("cuda") else "cpu"
        by = row.get("operators") or f"{row['threads']} threads"
        case = f"{row['dtype']}, {row['bits']} bits, {by}"
        speed, size = row["both_of_copy"], row["bytes_of_bf16"]
        yield Target(case=case, what="encode and decode, of copy", value=speed, wanted=SPEED[where])
        yield Target(
            case=case, what="bytes, of bf16", value=size, wanted=BYTES[row["bits"]], at_most=True
        )


if __name__ == "__main__":
    main()
