"""Verification of checkpoints, and error messages for damaged ones with advice."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax
from etils import epath

from t5x_lab.checkpoints import checksums
from t5x_lab.checkpoints.formats.t5x_lab import open_part
from t5x_lab.checkpoints.layout import ARRAYS, INFO, Corrupt, finished_steps, is_file_name, named_leaves, read_info
from t5x_lab.checkpoints.lazy_tensors import Unreadable
from t5x_lab.config.errors import UserError
from t5x_lab.config.json_files import parse_json
from t5x_lab.config.steps import parse_step

DATA_DIGESTS = "digests_{}.json"  # digests of the files that a process wrote to `data`
DATA_DIGESTS_NAME = re.compile(r"digests_\d+\.json")
_OUTAGE = re.compile("UNAVAILABLE|DEADLINE_EXCEEDED|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED|ABORTED|CANCELLED")


def verify(path: epath.Path) -> bool:
    """Reads a checkpoint one array at a time and compares it with its checksums.

    Args:
      path: a `checkpoints/<step>` directory.

    Returns:
      Whether it has checksums. Format 1 has none.

    Raises:
      UserError: if it is damaged.
    """
    info = read_info(path)
    saved = info.get("checksums", {})
    for part in ARRAYS:
        names = sorted(name for name in saved if name.startswith(f"{part}/"))
        arrays = open_part(path, part) if names else {}
        for name in names:
            tensor = arrays.get(name.removeprefix(f"{part}/"))
            checksum = checksums.checksum_of_chunks(tensor.chunks()) if tensor is not None else "no array"
            checksums.compare(path, {name: checksum}, saved)
    check_data_files(path)
    return bool(saved)


def check_arrays(path: epath.Path, restored: dict) -> None:
    """Compares restored arrays with the checkpoint's checksums. All processes must call this.

    Raises:
      Corrupt: with the first array that differs.
    """
    saved = read_info(path).get("checksums")
    if saved is not None:
        checksums.compare(path, checksums.checksums(named_leaves(restored)), saved)


def check_data_files(
    path: epath.Path, folder: epath.Path | None = None, needs: Callable[[str], bool] = lambda name: True
) -> None:
    """Compares the files of the data position with their digests.

    Args:
      path: the checkpoint.
      folder: folder of the files. Default: the checkpoint's own.
      needs: function that returns whether a file is compared.

    Raises:
      Corrupt: with the first file that differs.
    """
    folder = folder or path / "data"
    for process in range(read_info(path).get("processes", 0)):
        digest_file = folder / DATA_DIGESTS.format(process)
        try:
            digests = parse_json(digest_file.read_bytes())
            for name, digest in digests.items():
                if not is_file_name(name):
                    raise Corrupt(path, f"data/{digest_file.name} lists a file outside of data/")
                if needs(name) and checksums.file_digest(folder / name) != digest:
                    raise Corrupt(path, f"data/{name} differs from what was saved")
        except (OSError, ValueError, AttributeError) as error:
            raise Corrupt(path, f"data/{digest_file.name} or a file that it lists cannot be read ({error})") from error


@contextlib.contextmanager
def explain_damage(*paths: epath.Path) -> Iterator[None]:
    """Converts errors from a damaged checkpoint into a `UserError` with the latest intact checkpoint before it.

    Args:
      *paths: the checkpoints that are read.

    Raises:
      UserError: for any error that a damaged file may cause.
    """
    try:
        yield
    except Unreadable as error:
        raise UserError(f"{error.sentence} {_advice(_named_in(error.sentence, paths))}".rstrip()) from error
    except (UserError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # an out-of-memory error or a lost process is not caused by the files
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        if _OUTAGE.search(reason) or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            path = _named_in(reason, paths)
            raise UserError(
                f"The checkpoint {path} could not be read ({reason}). Try again when the storage is available."
            ) from error
        path = paths[0] if len(paths) == 1 else next((path for path in paths if _is_damaged(path)), paths[0])
        raise UserError(f"{Corrupt(path, reason).sentence} {_advice(path)}".rstrip()) from error


def _named_in(text: str, paths: Sequence[epath.Path]) -> epath.Path:
    """Returns the path that a message names, of several the longest one; the first path if it names none."""
    return max((path for path in paths if str(path) in text), key=lambda path: len(str(path)), default=paths[0])


def _is_damaged(path: epath.Path) -> bool:
    """Returns whether a checkpoint of t5x_lab is damaged; False for other formats, which have no checksums."""
    if not (path / INFO).exists():
        return False
    try:
        verify(path)
    except Exception:  # of files in any state
        return True
    return False


def _advice(path: epath.Path) -> str:
    damaged_step = parse_step(path.name)
    if damaged_step is None or path.parent.name != "checkpoints":
        return ""
    run = path.parent.parent
    for step in reversed([step for step in finished_steps(run) if step < damaged_step]):
        try:
            verify(path.parent / str(step))
        except UserError:
            continue
        return (
            f"The latest intact checkpoint before it is of step {step}. To continue from there, move the damaged one away "
            f"(mv {path} {run / f'damaged_{path.name}'}) and run the same command again."
        )
    return "There is no intact checkpoint before it."
