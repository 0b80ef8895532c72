"""Checksums of what is read of a checkpoint, taken while it is read: files are not read a second time to be verified."""

import itertools
import json
from collections.abc import Mapping

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from t5x_lab.checkpoints.checksums import hexadecimal, sums_of_region
from t5x_lab.checkpoints.layout import Corrupt
from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor

Box = tuple[tuple[int, int], ...]  # (start, stop) of each dimension


class Witness:
    """Sees what this process reads of a checkpoint's arrays.

    Args:
      path: of the checkpoint.
      checksums: of its arrays, by name; an array without one is not looked at.
    """

    def __init__(self, path: epath.Path, checksums: Mapping[str, str]):
        self._path, self._checksums = path, checksums
        self._tensors: dict[str, LazyTensor] = {}
        self._seen: dict[str, dict[Box, np.ndarray]] = {}

    def watch(self, name: str, tensor: LazyTensor) -> LazyTensor:
        """The array of that name, every part of which is looked at when it is first read."""
        if name not in self._checksums:
            return tensor
        self._tensors[name] = tensor

        def read(index: Index) -> np.ndarray:
            array = tensor.read(index)
            box = tuple(part.indices(size)[:2] for part, size in zip(index, tensor.shape, strict=True))
            seen = self._seen.setdefault(name, {})
            if box not in seen:
                seen[box] = sums_of_region(array, [start for start, _ in box], tensor.shape)
            return array

        return LazyTensor(tensor.shape, tensor.dtype, read)

    def check(self) -> None:
        """Compares the arrays that were read with their checksums. Several processes call this together.

        What was read of an array by none of them is read now, by all in turns.

        Raises:
          Corrupt: naming the first that differs.
        """
        seen = sorted(_together({name: _joined(boxes) for name, boxes in self._seen.items()}).items())
        totals = np.zeros((len(seen), 2), np.uint32)
        for (name, boxes), total in zip(seen, totals, strict=True):
            tensor, chosen = self._tensors[name], list(boxes)
            left, overlap = _left(tensor.shape, chosen)
            if overlap:
                chosen = _apart(boxes)
                left, _ = _left(tensor.shape, chosen)
            for box in left[jax.process_index() :: jax.process_count()]:
                part = tensor.read(tuple(slice(*ends) for ends in box))
                total += sums_of_region(part, [start for start, _ in box], tensor.shape)
            if jax.process_index() == 0:
                for box in chosen:
                    total += boxes[box]
        if jax.process_count() > 1:
            totals = np.sum(multihost_utils.process_allgather(totals), axis=0, dtype=np.uint32)
        different = [name for (name, _), total in zip(seen, totals, strict=True) if hexadecimal(total) != self._checksums[name]]
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise Corrupt(self._path, f"{different[0]}{more} is not as it was saved")


def _joined(boxes: Mapping[Box, np.ndarray]) -> dict[Box, np.ndarray]:
    """Boxes that follow each other along the first axis, such as layers that were read one by one, as one."""
    joined: dict[Box, np.ndarray] = {}
    last: Box | None = None
    for box, sums in sorted(boxes.items(), key=lambda item: (item[0][1:], item[0][:1])):
        if last and box and last[1:] == box[1:] and last[0][1] == box[0][0]:
            sums, box = joined.pop(last) + sums, ((last[0][0], box[0][1]), *box[1:])
        joined[box], last = sums, box
    return joined


def _together(mine: Mapping[str, Mapping[Box, np.ndarray]]) -> dict[str, dict[Box, np.ndarray]]:
    """What all processes have seen."""
    if jax.process_count() == 1:
        return {name: dict(boxes) for name, boxes in mine.items()}
    text = json.dumps({name: [[box, sums.tolist()] for box, sums in boxes.items()] for name, boxes in mine.items()}).encode()
    sizes = np.ravel(multihost_utils.process_allgather(np.array([len(text)])))
    padded = np.frombuffer(text.ljust(int(sizes.max())), np.uint8)
    found: dict[str, dict[Box, np.ndarray]] = {}
    for row in np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1)):
        for name, boxes in json.loads(row.tobytes()).items():
            of_name = found.setdefault(name, {})
            of_name.update({tuple(map(tuple, box)): np.array(sums, np.uint32) for box, sums in boxes})
    return found


def _apart(boxes: Mapping[Box, np.ndarray]) -> list[Box]:
    """Boxes of which no two overlap, the largest first."""
    volume = lambda box: int(np.prod([stop - start for start, stop in box], dtype=np.int64))
    chosen: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-volume(box), box)):
        overlaps = (all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in chosen)
        if not any(overlaps):
            chosen.append(box)
    return chosen


def _left(shape: tuple[int, ...], boxes: list[Box]) -> tuple[list[Box], bool]:
    """What boxes leave of an array, as boxes, and whether any of them overlap."""
    cuts = [sorted({0, size, *itertools.chain(*(box[axis] for box in boxes))}) for axis, size in enumerate(shape)]
    at = [{point: i for i, point in enumerate(points)} for points in cuts]
    times = np.zeros([len(points) - 1 for points in cuts], np.int32)  # how many boxes each cell between cuts is in
    for box in boxes:
        times[tuple(slice(places[a], places[b]) for places, (a, b) in zip(at, box, strict=True))] += 1
    cells = [
        tuple((points[i], points[i + 1]) for points, i in zip(cuts, cell, strict=True)) for cell in np.argwhere(times == 0)
    ]
    return cells, bool((times > 1).any())
