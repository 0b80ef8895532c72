"""Verification of arrays while they are read, so that no file is read twice."""

import itertools
import json
from collections.abc import Mapping

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from t5x_lab.checkpoints.checksums import compare, hexadecimal, region_sums
from t5x_lab.checkpoints.lazy_tensors import Index, LazyTensor

Box = tuple[tuple[int, int], ...]  # region of an array: (start, stop) of each dimension


class ReadVerifier:
    """Records checksums of the array regions that this process reads.

    Args:
      path: checkpoint directory.
      checksums: checksums of its arrays by name. Arrays without a checksum are not checked.
    """

    def __init__(self, path: epath.Path, checksums: Mapping[str, str]):
        self._path, self._checksums = path, checksums
        self._tensors: dict[str, LazyTensor] = {}
        self._sums: dict[str, dict[Box, np.ndarray]] = {}

    def wrap(self, name: str, tensor: LazyTensor) -> LazyTensor:
        """Returns the tensor wrapped so that the checksum of every region is recorded when it is first read."""
        if name not in self._checksums:
            return tensor
        self._tensors[name] = tensor

        def read(index: Index) -> np.ndarray:
            array = tensor.read(index)
            box = tuple(part.indices(size)[:2] for part, size in zip(index, tensor.shape, strict=True))
            sums = self._sums.setdefault(name, {})
            if box not in sums:
                sums[box] = region_sums(array, [start for start, _ in box], tensor.shape)
            return array

        return LazyTensor(tensor.shape, tensor.dtype, read)

    def check(self) -> None:
        """Compares the arrays that were read with their checksums. All processes must call this.

        Regions that no process has read are read now, distributed over the processes.

        Raises:
          Corrupt: with the first array that differs.
        """
        arrays = sorted(_gather({name: _merge_boxes(boxes) for name, boxes in self._sums.items()}).items())
        totals = np.zeros((len(arrays), 2), np.uint32)
        for (name, boxes), total in zip(arrays, totals, strict=True):
            tensor, chosen = self._tensors[name], list(boxes)
            unread, overlap = _complement(tensor.shape, chosen)
            if overlap:
                chosen = _select_disjoint(boxes)
                unread, _ = _complement(tensor.shape, chosen)
            for box in unread[jax.process_index() :: jax.process_count()]:
                part = tensor.read(tuple(slice(*ends) for ends in box))
                total += region_sums(part, [start for start, _ in box], tensor.shape)
            if jax.process_index() == 0:
                for box in chosen:
                    total += boxes[box]
        if jax.process_count() > 1:
            totals = np.sum(multihost_utils.process_allgather(totals), axis=0, dtype=np.uint32)
        sums = {name: hexadecimal(total) for (name, _), total in zip(arrays, totals, strict=True)}
        compare(self._path, sums, self._checksums)


def _merge_boxes(boxes: Mapping[Box, np.ndarray]) -> dict[Box, np.ndarray]:
    """Merges boxes that are adjacent along the first axis, such as layers that were read one by one."""
    merged: dict[Box, np.ndarray] = {}
    last: Box | None = None
    for box, sums in sorted(boxes.items(), key=lambda item: (item[0][1:], item[0][:1])):
        if last and box and last[1:] == box[1:] and last[0][1] == box[0][0]:
            sums, box = merged.pop(last) + sums, ((last[0][0], box[0][1]), *box[1:])
        merged[box], last = sums, box
    return merged


def _gather(local: Mapping[str, Mapping[Box, np.ndarray]]) -> dict[str, dict[Box, np.ndarray]]:
    """Returns the regions and sums of all processes."""
    if jax.process_count() == 1:
        return {name: dict(boxes) for name, boxes in local.items()}
    text = json.dumps({name: [[box, sums.tolist()] for box, sums in boxes.items()] for name, boxes in local.items()}).encode()
    sizes = np.ravel(multihost_utils.process_allgather(np.array([len(text)])))
    padded = np.frombuffer(text.ljust(int(sizes.max())), np.uint8)
    gathered: dict[str, dict[Box, np.ndarray]] = {}
    for row in np.reshape(multihost_utils.process_allgather(padded), (len(sizes), -1)):
        for name, boxes in json.loads(row.tobytes()).items():
            boxes_by_name = gathered.setdefault(name, {})
            boxes_by_name.update({tuple(map(tuple, box)): np.array(sums, np.uint32) for box, sums in boxes})
    return gathered


def _select_disjoint(boxes: Mapping[Box, np.ndarray]) -> list[Box]:
    """Returns boxes that do not overlap, selected greedily from the largest."""
    volume = lambda box: int(np.prod([stop - start for start, stop in box], dtype=np.int64))
    chosen: list[Box] = []
    for box in sorted(boxes, key=lambda box: (-volume(box), box)):
        overlaps = (all(a < d and c < b for (a, b), (c, d) in zip(box, other, strict=True)) for other in chosen)
        if not any(overlaps):
            chosen.append(box)
    return chosen


def _complement(shape: tuple[int, ...], boxes: list[Box]) -> tuple[list[Box], bool]:
    """Returns the part of an array that no box covers, as boxes, and whether boxes overlap."""
    cuts = [sorted({0, size, *itertools.chain(*(box[axis] for box in boxes))}) for axis, size in enumerate(shape)]
    at = [{point: i for i, point in enumerate(points)} for points in cuts]
    times = np.zeros([len(points) - 1 for points in cuts], np.int32)  # number of boxes that cover each cell
    for box in boxes:
        times[tuple(slice(places[a], places[b]) for places, (a, b) in zip(at, box, strict=True))] += 1
    cells = [
        tuple((points[i], points[i + 1]) for points, i in zip(cuts, cell, strict=True)) for cell in np.argwhere(times == 0)
    ]
    return cells, bool((times > 1).any())
