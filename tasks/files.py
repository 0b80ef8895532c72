"""The user's text files: `files` reads what `TextFiles` sets in gin."""

from t5x_lab.data.config import TextFiles
from t5x_lab.data.sources.text_files import text_files
from t5x_lab.data.tasks.names import register_text
from t5x_lab.data.tasks.text_tasks import LazySource

register_text("files", LazySource(lambda: text_files(TextFiles())))  # a run's own TextFiles replace it
