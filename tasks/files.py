"""Pre-training on one's own text from gin alone: `files` is what `TextFiles` names."""

from t5x_lab.data.config import TextFiles
from t5x_lab.data.sources import text_files
from t5x_lab.data.tasks import register_text
from t5x_lab.data.texts import OpenedWhenRead

register_text("files", OpenedWhenRead(lambda: text_files(TextFiles())))  # a run's own TextFiles take its place
