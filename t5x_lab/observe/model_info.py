"""Table of a model's parameters: name, shape, logical axes, sharding and bytes."""

import math

import jax

from t5x_lab.models.model import Model
from t5x_lab.partitioning.partitioner import Partitioner
from t5x_lab.partitioning.rules import is_axes


def parameter_rows(model: Model, partitioner: Partitioner | None = None) -> list[dict]:
    """Returns a dict per parameter: `name`, `shape`, `dtype`, `axes`, `bytes`; on a mesh `sharding`, `bytes_per_device`."""
    axes = jax.tree.leaves(model.axes, is_leaf=is_axes)
    rows = []
    leaves = jax.tree_util.tree_leaves_with_path(model.abstract_params)
    for (path, param), names in zip(leaves, axes, strict=True):
        size = math.prod(param.shape) * param.dtype.itemsize
        row = {
            "name": jax.tree_util.keystr(path, simple=True, separator="/"),
            "shape": list(param.shape),
            "dtype": str(param.dtype),
            "axes": list(names),
            "bytes": size,
        }
        if partitioner is not None:
            spec = partitioner.spec(names, param.shape)
            row["sharding"] = list(spec)
            row["bytes_per_device"] = partitioner.bytes_per_device(size, spec)
        rows.append(row)
    return rows


def model_info(model: Model, partitioner: Partitioner | None = None) -> str:
    """Returns the table in model-info.txt."""
    rows = parameter_rows(model, partitioner)
    header = ["parameter", "shape", "axes", "bytes"] + (["sharding", "bytes/device"] if partitioner else [])
    cells = [
        [row["name"], "x".join(map(str, row["shape"])), ", ".join(name or "-" for name in row["axes"]), f"{row['bytes']:,}"]
        + ([", ".join(str(s or "-") for s in row["sharding"]), f"{row['bytes_per_device']:,}"] if partitioner else [])
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
    numeric = {3, 5}
    lines = [
        "  ".join(cell.rjust(w) if i in numeric else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in [header, *cells]
    ]
    total = sum(row["bytes"] for row in rows)
    lines.append(f"\n{model.num_parameters:,} parameters, {total:,} bytes")
    if partitioner:
        mesh = partitioner.mesh
        lines.append(
            f"{sum(row['bytes_per_device'] for row in rows):,} bytes per device on {mesh.size} devices, mesh {dict(mesh.shape)}"
        )
        all_axes = {name for row in rows for name in row["axes"]}
        lines += [
            f'ShardingRules.parameters has a rule for "{name}", but no parameter has this axis.'
            for name in partitioner.rules.parameters
            if name not in all_axes
        ]
    return "\n".join(line.rstrip() for line in lines) + "\n"
