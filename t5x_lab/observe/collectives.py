"""How often, and with how many bytes, the devices of a compiled program talk to each other."""

import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s64": 8, "u64": 8, "f64": 8}  # others: 4
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALL = re.compile(r"\b(?:calls|body|to_apply|true_computation|false_computation|branch_computations)=\{?([^\s,}]+)")
_TRIPS = re.compile(r"known_trip_count\D*(\d+)")


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Kind -> `count` and `bytes` of results on one device, in one run of a compiled program's text.

    What stands in a loop counts as often as the loop runs: its known trip count, or the number its condition compares with.
    """
    computations = _computations(hlo)
    known: dict[str, dict[str, list[int]]] = {}

    def total(name: str) -> dict[str, list[int]]:
        if name in known:
            return known[name]
        counts = {kind: [0, 0] for kind in KINDS}
        for line in computations.get(name, []):
            if found := _COLLECTIVE.search(line):
                counts[found[2]][0] += 1
                counts[found[2]][1] += _result_bytes(found[1], asynchronous=bool(found[3]))
            if " async-update(" in line or " async-done(" in line:
                continue  # they name the computation that their start has called
            times = _trips(line, computations) if " while(" in line else 1
            for callee in _CALL.findall(line):
                for kind, (count, size) in total(callee).items():
                    counts[kind][0] += times * count
                    counts[kind][1] += times * size
        known[name] = counts
        return counts

    entry = next((name for name, lines in computations.items() if lines[0].startswith("ENTRY")), "")
    return {kind: {"count": count, "bytes": size} for kind, (count, size) in total(entry).items() if count}


def _computations(hlo: str) -> dict[str, list[str]]:
    """Lines of each computation by its name, the first being its head."""
    result: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if line.endswith("{") and (head := re.match(r"(?:ENTRY )?(%?[\w.\-]+) \(", line)):
            lines = result[head[1]] = [line]
        else:
            lines.append(line)
    return result


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    if found := _TRIPS.search(line):
        return int(found[1])
    condition = re.search(r"condition=([^\s,]+)", line)
    body = "\n".join(computations[condition[1]]) if condition else ""
    limits = [int(number) for number in re.findall(r"constant\((\d+)\)", body)]
    return max(limits, default=1)


def _result_bytes(shape: str, asynchronous: bool) -> int:
    """Bytes of a result's shape. A start's is (operands, results, …): the results are its second half."""
    arrays = [_BYTES.get(dtype, 4) * _product(dims) for dtype, dims in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shape) if dims]
    return sum(arrays[len(arrays) // 2 :]) if asynchronous and shape.startswith("(") else sum(arrays)


def _product(dims: str) -> int:
    result = 1
    for size in dims.split(","):
        result *= int(size)
    return result
