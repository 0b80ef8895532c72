"""Registration of a user's data sets, in a module that a gin file imports. `DATA_SETS` does the same in gin."""

from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.config import Records
from t5x_lab.prompts.data_sets import USER_SOURCES

__all__ = ["Records", "register"]


def register(name: str, source: Any) -> None:
    """Registers the records of a data set.

    Args:
      name: a new name such as "mine", or that of a built-in data set such as "super_glue/rte".
      source: `Records`, or a `seqio.DataSource` whose elements are dictionaries or JSON texts.

    Raises:
      UserError: for any other source.
    """
    if not isinstance(source, Records) and not hasattr(source, "get_dataset"):
        raise UserError(f'The source of the data set "{name}" is {source!r}. It must be Records or a seqio.DataSource.')
    USER_SOURCES[name] = source
