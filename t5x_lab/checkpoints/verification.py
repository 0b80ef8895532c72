"""Whether a checkpoint is as it was saved, and what a user can do where it is not."""

import contextlib
import json
import re
from collections.abc import Iterator

import jax
from etils import epath

from t5x_lab.checkpoints import checksums
from t5x_lab.checkpoints.formats.t5x_lab import open_part
from t5x_lab.checkpoints.layout import ARRAYS, Corrupt, finished_steps, is_file_name, named_leaves, read_info
from t5x_lab.checkpoints.lazy_tensors import Unreadable
from t5x_lab.config.errors import UserError

DATA_DIGESTS = "digests_{}.json"  # of the files in `data` that a process wrote
_OUTAGE = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED")


def verify(path: epath.Path) -> bool:
    """Reads a checkpoint, one array at a time, and compares it with the checksums.

    Args:
      path: a `checkpoints/<step>` directory.

    Returns:
      whether there were checksums; format 1 had none.

    Raises:
      UserError: when it is damaged.
    """
    info = read_info(path)
    saved = info.get("checksums", {})
    for part in ARRAYS:
        names = sorted(name for name in saved if name.startswith(f"{part}/"))
        arrays = open_part(path, part) if names else {}
        for name in names:
            tensor = arrays.get(name.removeprefix(f"{part}/"))
            if tensor is None or checksums.checksum_of_chunks(tensor.chunks()) != saved[name]:
                raise Corrupt(path, f"{name} is not as it was saved")
    check_data_files(path)
    return bool(saved)


def check_arrays(path: epath.Path, restored: dict) -> None:
    """Compares restored arrays with the checksums of the checkpoint. Several processes call this together.

    Raises:
      Corrupt: naming the first that differs.
    """
    saved = read_info(path).get("checksums")
    if saved is None:
        return
    found = checksums.checksums(named_leaves(restored))
    different = [name for name in sorted(found) if found[name] != saved.get(name)]
    if different:
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise Corrupt(path, f"{different[0]}{more} came back with another checksum than it was saved with")


def check_data_files(path: epath.Path) -> None:
    """Compares the files of the position in the data with their digests.

    Raises:
      Corrupt: naming the first that differs.
    """
    for process in range(read_info(path).get("processes", 0)):
        listed = path / "data" / DATA_DIGESTS.format(process)
        try:
            digests = json.loads(listed.read_bytes())
            for name, digest in digests.items():
                if not is_file_name(name):
                    raise Corrupt(path, f"data/{listed.name} names a file outside of it")
                if checksums.file_digest(path / "data" / name) != digest:
                    raise Corrupt(path, f"data/{name} is not as it was saved")
        except (OSError, ValueError, AttributeError) as error:
            raise Corrupt(path, f"data/{listed.name} or a file that it lists cannot be read ({error})") from error


@contextlib.contextmanager
def explaining_damage(path: epath.Path) -> Iterator[None]:
    """Turns what a damaged file leads to into a sentence that names the newest whole checkpoint before this one.

    Raises:
      UserError: for whatever a damaged file leads to.
    """
    try:
        yield
    except Unreadable as error:
        raise UserError(f"{error.sentence} {_advice(path)}".rstrip()) from error
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # a device without memory, or another process that is gone, says nothing of the files
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        if _OUTAGE.search(what) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            raise UserError(f"The checkpoint {path} could not be read ({what}). Try again when the storage can be.") from error
        raise UserError(f"{Corrupt(path, what).sentence} {_advice(path)}".rstrip()) from error


def _advice(path: epath.Path) -> str:
    if not path.name.isdigit() or path.parent.name != "checkpoints":
        return ""
    run = path.parent.parent
    for step in reversed([step for step in finished_steps(run) if step < int(path.name)]):
        try:
            verify(path.parent / str(step))
        except UserError:
            continue
        return (
            f"The newest whole one before it is of step {step}: to go on from there, move the damaged one away "
            f"(mv {path} {run / f'damaged_{path.name}'}) and run the same command again."
        )
    return "There is no whole one before it."
