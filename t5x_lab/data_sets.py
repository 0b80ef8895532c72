"""Data sets of one's own, from a module that a gin file imports; `DATA_SETS` says the same in gin."""

from typing import Any

from t5x_lab.config.errors import UserError
from t5x_lab.prompts.catalogue import REGISTERED
from t5x_lab.prompts.config import Records

__all__ = ["Records", "register"]


def register(name: str, source: Any) -> None:
    """Says where the records of a data set lie.

    Args:
      name: such as "mine", or one that is known, such as "super_glue/rte".
      source: `Records`, or a `seqio.DataSource` of records, whose elements are dictionaries or texts of JSON.

    Raises:
      UserError: for anything else.
    """
    if not isinstance(source, Records) and not hasattr(source, "get_dataset"):
        raise UserError(f'The source of the data set "{name}" is {source!r}; give Records or a seqio.DataSource.')
    REGISTERED[name] = source
