"""The six pairs of architecture and objective: masks, inputs, targets and weights; the pipeline's order, position and shards."""

import collections
import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import sentencepiece
import seqio
import tensorflow as tf
import tensorflow_text as tf_text
from conftest import shared_data
from helpers import tiny_config
from t5.data import preprocessors as t5_preprocessors

from t5x_lab.cli.main import main
from t5x_lab.config.errors import UserError
from t5x_lab.data import environment
from t5x_lab.data.config import DataConfig, TextFiles
from t5x_lab.data.pipeline.batches import SeqioBatches, resolve_tasks
from t5x_lab.data.pipeline.checks import check_vocabulary
from t5x_lab.data.pipeline.evaluation_batches import EvalBatches, eval_batches
from t5x_lab.data.sources import resumable
from t5x_lab.data.sources.resumable import numbered_chunks, resumable_reader
from t5x_lab.data.sources.text_files import text_files
from t5x_lab.data.tasks import names as tasks
from t5x_lab.data.vocabularies.build import build_vocabulary
from t5x_lab.data.vocabularies.config import ByteVocabulary, SentencePieceVocabulary
from t5x_lab.data.vocabularies.sentencepiece import train_sentencepiece
from t5x_lab.models.config import ModelConfig
from t5x_lab.models.model import Model
from t5x_lab.ops.masks import expand_mask
from t5x_lab.training.batches import Rows

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)


def text_source(*documents: str) -> seqio.FunctionDataSource:
    def dataset(split, shuffle_files=False, seed=None):
        del split, shuffle_files, seed
        return tf.data.Dataset.from_tensor_slices({"text": list(documents)})

    return seqio.FunctionDataSource(dataset, splits=["train", "validation"])


@pytest.fixture
def text():
    """Registers documents as a text, for one test."""
    tasks.known_names()  # t5x_lab's own first
    yield lambda *documents: tasks.register_text("text", text_source(*documents))
    if "text" in tasks._TEXTS:
        tasks.remove_text("text")


def rows_of(objective, architecture, lengths, documents, pack=True, count=4):
    """The first rows of an objective on documents in their order."""
    tasks.known_names()
    tasks.register_text("text", text_source(*documents))
    try:
        config = DataConfig("text", lengths, 1, ByteVocabulary(), objective=objective, shards=1, pack=pack, eval_steps=count)
        resolved = resolve_tasks(config, architecture, 384)
        return [{name: x[0] for name, x in row.items()} for row in eval_batches(resolved, resolved.components[0], config)]
    finally:
        tasks.remove_text("text")


def mask_of(architecture, row):
    """Decoder and cross mask of one row, as 0/1 matrices."""
    model = Model(ModelConfig(tiny_config(architecture, vocab_size=384)))
    batch = {name: jnp.asarray(x)[None] for name, x in row.items() if name != "raw_tokens"}
    network = model.network(model.init(jax.random.key(0)))
    mask, cross = network.decoder_masks(batch)
    T = row["decoder_target_tokens"].shape[0]
    as_matrix = lambda m, S: np.asarray(expand_mask(m, T, S)[0]).astype(int)
    return as_matrix(mask, T), None if cross is None else as_matrix(cross, row["encoder_input_tokens"].shape[0])


def encode(text):
    return VOCABULARY.encode(text)


def shifted(tokens):
    return [0, *tokens[:-1]]


def lower_triangle(n):
    return np.tril(np.ones((n, n), int))


def test_full_lm_of_a_causal_decoder_by_hand():
    """Two documents of 9 and 12 bytes with end tokens make 23 tokens: a row of 16 and a rest of 7."""
    first, second = rows_of("full_lm", "causal_decoder", {"targets": 16}, ["one two t", "four five si"], pack=False)
    stream = [*encode("one two t"), 1, *encode("four five si"), 1]
    assert first["decoder_target_tokens"].tolist() == stream[:16]
    assert first["decoder_input_tokens"].tolist() == shifted(stream[:16])
    assert first["decoder_loss_weights"].tolist() == [1] * 16  # the end token in the middle has loss too
    assert first["raw_tokens"] == 15  # without the end token
    np.testing.assert_array_equal(mask_of("causal_decoder", first)[0], lower_triangle(16))  # no barrier between documents
    assert second["decoder_target_tokens"].tolist() == stream[16:] + [0] * 9
    assert second["decoder_loss_weights"].tolist() == [1] * 7 + [0] * 9
    assert "decoder_causal_attention" not in first


def test_prefix_lm_of_a_prefix_decoder_by_hand():
    documents = ["abcdefghijklmno", "pqrstuvwxyzabcd"]
    rows = rows_of("prefix_lm_objective_decoder_architecture", "prefix_decoder", {"targets": 16}, documents)
    splits = set()
    for row, document in zip(rows, documents):
        stream = [*encode(document), 1]
        assert row["decoder_target_tokens"].tolist() == stream
        assert row["decoder_input_tokens"].tolist() == shifted(stream)
        split = 16 - int(row["decoder_loss_weights"].sum())
        splits.add(split)
        assert 1 <= split <= 15
        assert row["decoder_loss_weights"].tolist() == [int(i >= split) for i in range(16)]
        assert row["decoder_causal_attention"].tolist() == [int(i <= split) for i in range(16)]  # one more: inputs are shifted
        expected = [[int(k <= q or (q <= split and k <= split)) for k in range(16)] for q in range(16)]
        np.testing.assert_array_equal(mask_of("prefix_decoder", row)[0], expected)
        assert row["raw_tokens"] == 15
    assert len(splits) == 2, "two rows should not be split alike"


def test_prefix_lm_of_an_encoder_decoder_by_hand():
    """Two sequences A and B share a row: A[:i] and B[:16-i] encoded, their rests decoded, no padding anywhere."""
    first, second = "abcdefghijklmno", "pqrstuvwxyzabcd"
    A, B = [*encode(first), 1], [*encode(second), 1]
    (row,) = rows_of(
        "prefix_lm_objective_encoder_decoder_architecture", "encoder_decoder", {"inputs": 16, "targets": 16}, [first, second]
    )
    i = int((row["encoder_segment_ids"] == 1).sum())
    assert row["encoder_input_tokens"].tolist() == A[:i] + B[: 16 - i]
    assert row["decoder_target_tokens"].tolist() == A[i:] + B[16 - i :]
    assert row["decoder_input_tokens"].tolist() == shifted(A[i:]) + shifted(B[16 - i :])
    assert row["decoder_segment_ids"].tolist() == [1] * (16 - i) + [2] * i
    assert row["decoder_positions"].tolist() == [*range(16 - i), *range(i)]
    assert row["decoder_loss_weights"].tolist() == [1] * 16
    assert row["raw_tokens"] == 30
    own, cross = mask_of("encoder_decoder", row)
    decoder, encoder = np.array([1] * (16 - i) + [2] * i), np.array([1] * i + [2] * (16 - i))
    np.testing.assert_array_equal(own, lower_triangle(16) * (decoder[:, None] == decoder))
    np.testing.assert_array_equal(cross, decoder[:, None] == encoder)


def rebuild(inputs, targets):
    """The text before span corruption: each sentinel of the inputs replaced by what follows it in the targets."""
    sentinels = [t for t in inputs if t >= 259]
    assert sentinels == sorted(sentinels, reverse=True) and len(set(sentinels)) == len(sentinels)
    assert [t for t in targets if t >= 259][: len(sentinels)] == sentinels
    spans, current = {}, None
    for token in targets:
        if token >= 259:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [piece for token in inputs for piece in (spans[token] if token >= 259 else [token])]


@pytest.mark.parametrize("architecture", ["causal_decoder", "prefix_decoder", "encoder_decoder"])
def test_span_corruption_by_hand(architecture):
    """At 16: 17 raw tokens, of which 3 are noise in one span: inputs 14 + sentinel + end, targets sentinel + 3 + end."""
    assert t5_preprocessors.random_spans_helper(16, 0.15, 3.0, 1, 1) == (17, 5)
    text = "The quick brown fox jumps over the lazy dog again and again, and then it sleeps."
    rows = rows_of("span_corruption", architecture, {"inputs": 16, "targets": 8}, [text], pack=False)
    for n, row in enumerate(rows):
        if architecture == "encoder_decoder":
            inputs, targets = (list(row[name][row[name] > 0]) for name in ("encoder_input_tokens", "decoder_target_tokens"))
            assert row["decoder_input_tokens"].tolist() == shifted(row["decoder_target_tokens"].tolist())
            assert row["decoder_loss_weights"].tolist() == [1] * len(targets) + [0] * (8 - len(targets))
            own, cross = mask_of(architecture, row)
            np.testing.assert_array_equal(own[: len(targets), : len(targets)], lower_triangle(len(targets)))
            np.testing.assert_array_equal(cross[: len(targets)], np.arange(16) < np.full((len(targets), 1), len(inputs)))
        else:
            tokens = list(row["decoder_target_tokens"][row["decoder_target_tokens"] > 0])
            prefix = tokens.index(1) + 1
            inputs, targets = tokens[:prefix], tokens[prefix:]
            length, used = 24, len(tokens)
            assert row["decoder_input_tokens"].tolist() == shifted(row["decoder_target_tokens"].tolist())
            assert row["decoder_loss_weights"].tolist() == [int(prefix <= i < used) for i in range(length)]
            assert row["decoder_causal_attention"].tolist() == [int(i <= prefix) for i in range(length)]
            both = lambda q, k: architecture == "prefix_decoder" and q <= prefix and k <= prefix
            expected = [[int((k <= q or both(q, k)) and q < used and k < used) for k in range(length)] for q in range(length)]
            np.testing.assert_array_equal(mask_of(architecture, row)[0], expected)
        assert inputs[-1] == targets[-1] == 1
        assert rebuild(inputs[:-1], targets[:-1]) == encode(text)[17 * n : 17 * (n + 1)]
        assert (len(inputs), len(targets), row["raw_tokens"]) == (16, 5, 17)


def test_budget_of_span_corruption_at_512_and_114():
    """Raffel et al., Wang et al.: 568 raw tokens, 512 + 114, 18.2 % of 626 with loss."""
    text = "In the course of human events it becomes necessary. " * 40
    for architecture in ("encoder_decoder", "causal_decoder"):
        row = rows_of("span_corruption", architecture, {"inputs": 512, "targets": 114}, [text])[0]
        tokens = np.concatenate([row[name] for name in ("encoder_input_tokens", "decoder_target_tokens") if name in row])
        assert (tokens > 0).all() and len(tokens) == 626
        assert row["decoder_loss_weights"].sum() == 114
        assert row["raw_tokens"] == 568


def small_config(task="sotu_span_corruption", **changes):
    lengths = {"inputs": 32, "targets": 16} if "span" in task else {"targets": 32}
    settings = dict(batch_size=8, vocabulary=ByteVocabulary(), shuffle_buffer_size=20, eval_steps=3, shards=1)
    return DataConfig(task, lengths, **{**settings, **changes})


def batches_of(config, architecture="encoder_decoder", seed=0, rows=Rows.all):
    return SeqioBatches(resolve_tasks(config, architecture, 384), config, seed, rows)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_processes_read_the_rows_they_hold_and_save_each_position_once(text, tmp_path):
    """Two shards of four rows: split evenly, and unevenly, where several processes hold a shard."""
    from etils import epath

    text(*(f"document {n} has a few words of its own" for n in range(60)))
    config = small_config("text_full_lm", shards=2)
    whole = batches_of(config, "causal_decoder")
    expected = [next(whole) for _ in range(2)]
    for number, held in enumerate([[[0, 1, 2, 3], [4, 5, 6, 7]], [[0], [1, 7], [2, 3, 4, 5, 6]]]):
        owned: set[int] = set()
        saved = []
        for process, rows in enumerate(map(np.array, held)):
            own_rows = Rows(rows, np.setdiff1d(rows, list(owned)))
            own_batches = batches_of(config, "causal_decoder", rows=lambda size, own_rows=own_rows: own_rows)
            owned |= set(rows.tolist())
            assert all(equal(next(own_batches), {name: x[rows] for name, x in batch.items()}) for batch in expected)
            directory = epath.Path(tmp_path) / f"{number}_{process}"
            directory.mkdir()
            own_batches.save(directory)
            saved += [file.name for file in directory.glob("*.index")]
        assert sorted(saved) == [f"shard_{shard}.index" for shard in range(2) if 4 * shard in owned]


@pytest.mark.slow
def test_an_epoch_has_every_example_once_if_processes_and_batch_sizes_change(tmp_path):
    """Four shards of 8 numbered examples, read by one process, two, and one; with rows left over at each change."""
    from etils import epath

    features = {name: seqio.Feature(VOCABULARY, add_eos=True) for name in ("inputs", "targets")}

    def numbered(split, shuffle_files=False, seed=None):
        del split, shuffle_files, seed
        texts = [f"{n:02d}" for n in range(32)]
        return tf.data.Dataset.from_tensor_slices({"inputs": texts, "targets": texts})

    source = seqio.FunctionDataSource(numbered, splits=["train"])
    steps = [seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    seqio.TaskRegistry.add("numbered", source, preprocessors=steps, output_features=features)

    def part_of(number, processes):
        def rows(size):
            own = np.split(np.arange(size), processes)[number]
            return Rows(own, own)

        return rows

    # Processes, and batch sizes of two epochs and a half.
    changes = [(1, [8, 8]), (2, [4, 12]), (2, [8, 8, 8]), (1, [4, 12, 8])]
    orders = []
    for parts in ([(1, [8] * 10)], changes):
        read: list[list[str]] = [[], [], [], []]
        step, before = 0, None
        for number, (processes, sizes) in enumerate(parts):
            schedule = {step + n: size for n, size in enumerate(sizes, 1)} if number else {}
            config = DataConfig(
                "numbered", {"inputs": 8, "targets": 8}, sizes[0], ByteVocabulary(), batch_schedule=schedule,
                shuffle_buffer_size=1, pack=False, shards=4,
            )  # fmt: skip
            readers = [batches_of(config, rows=part_of(n, processes)) for n in range(processes)]
            for reader in readers:
                reader.step = step
                if before:
                    reader.restore(before, before)
            for _ in sizes:
                rows = np.concatenate([next(reader)["encoder_input_tokens"] for reader in readers])
                for shard, own in enumerate(np.split(rows, 4)):
                    read[shard] += [VOCABULARY.decode([int(t) for t in row if t > 1]) for row in own]
            step += len(sizes)
            before = epath.Path(tmp_path) / f"{len(parts)}_{number}"
            before.mkdir()
            files = [file.name for reader in readers for file in reader.save(before)]
            assert len(files) == len(set(files))
            assert all(reader.needs(name) for reader in readers[:1] for name in files if "_0" in name or "_1" in name)
        orders.append(read)
    seqio.TaskRegistry.remove("numbered")
    assert orders[0] == orders[1]
    assert sorted(text for shard in orders[0] for text in shard[:8]) == [f"{n:02d}" for n in range(32)]


@pytest.mark.slow
def test_shards_read_every_document_once_and_mask_differently(text):
    """Four shards of 8 numbered documents: together all of them, no two alike; and their random choices differ."""
    text(*(f"document number {n} has its own words, {n} of them " * 3 for n in range(8)))
    lengths = {"inputs": 128, "targets": 60}
    config = DataConfig("text_span_corruption", lengths, 4, ByteVocabulary(), shuffle_buffer_size=1, pack=False, shards=4)
    batch = next(batches_of(config))
    texts_read = [VOCABULARY.decode([int(t) for t in row if 0 < t < 259]) for row in batch["encoder_input_tokens"]]
    assert len({text[:25] for text in texts_read}) == 4
    masks = {tuple(np.flatnonzero(row >= 259)) for row in batch["encoder_input_tokens"]}
    assert len(masks) == 4


@pytest.mark.slow
def test_evaluation_reads_the_same_held_out_rows_every_time_and_fills_up_with_padding():
    config = small_config("sotu_full_lm", eval_steps=10_000, batch_size=512)
    resolved = resolve_tasks(config, "causal_decoder", 384)
    once, again = (list(eval_batches(resolved, resolved.components[0], config)) for _ in range(2))
    assert len(once) == len(again) and all(map(equal, once, again))
    last = once[-1]["decoder_target_tokens"]
    assert last.shape == (512, 32) and not last[-1].any()
    from t5x_lab.tasks.sotu import speeches

    characters = sum(len(pathlib.Path(file).read_bytes().split()) for file in speeches()["validation"])
    num_words = sum(
        len(VOCABULARY.decode([int(t) for t in row if t > 1]).split())
        for batch in once
        for row in batch["decoder_target_tokens"]
    )
    assert num_words == pytest.approx(characters, rel=0.25)  # rows cut words in two, nothing is lost
    assert set(speeches()["train"]).isdisjoint(speeches()["validation"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "txt.zst", "jsonl", "tfrecord", "json.gz", "json.zst", "parquet"])
def test_a_folder_of_files_is_trained_on_from_gin_alone(kind, tmp_path):
    texts = [f"Line {n} of the user's own text, long enough to fill something." for n in range(200)]
    for part in range(2):
        lines = texts[part::2]
        path = tmp_path / f"part{part}.{kind}"
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"content": lines, "n": range(100)}), path, row_group_size=37)
        elif kind != "tfrecord":
            written = "\n\n".join(json.dumps({"content": line}) if "json" in kind else line for line in lines).encode()
            pack = {"gz": gzip.compress, "zst": lambda x: pyarrow.compress(x, "zstd", asbytes=True)}
            path.write_bytes(pack.get(kind.split(".")[-1], bytes)(written))
        else:
            with tf.io.TFRecordWriter(str(path)) as writer:
                for line in lines:
                    feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[line.encode()]))
                    writer.write(tf.train.Example(features=tf.train.Features(feature={"content": feature})).SerializeToString())
    files = TextFiles(train=str(tmp_path / f"*.{kind}"), text_key="content")
    batch = next(batches_of(small_config("files_full_lm", files=files), "causal_decoder"))
    assert "own text" in VOCABULARY.decode([int(t) for t in batch["decoder_target_tokens"].reshape(-1) if t > 1])
    results = [text.decode() for text in text_files(files).get_dataset("train").map(lambda x: x["text"]).as_numpy_iterator()]
    assert sorted(line for line in "\n".join(results).splitlines() if line) == sorted(texts)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4])
def test_files_that_cannot_be_read_are_named(shards, tmp_path):
    """Also where they are looked into before anything is read."""
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a", "b"]}), tmp_path / "column.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"")
    (tmp_path / "broken.txt.zst").write_bytes(b"no zst at all")
    (tmp_path / "broken.jsonl").write_text('{"text": "well"}\n' * 50 + "[1, 2]\n")
    for name, says in (
        ("column.parquet", 'column.parquet has no column "text"; it has content'),
        ("numbers.parquet", "at the first records of .*numbers.parquet: .*has values of the type int64, not texts"),
        ("broken.parquet", "at the first records of .*broken.parquet"),
        ("broken.txt.zst", "at the first records of .*broken.txt.zst"),
        ("broken.jsonl", r"at the first records of .*broken.jsonl: .*not an object with a text under"),
    ):
        with pytest.raises(UserError, match=f'The task "files_full_lm" fails .*{says}') as error:
            files = TextFiles(train=str(tmp_path / name))
            next(batches_of(small_config("files_full_lm", files=files, shards=shards), "causal_decoder"))
        assert "{{" not in str(error.value)


def test_formats_that_tensorflow_does_not_read_are_read_once_and_from_where_they_were(tmp_path, monkeypatch):
    monkeypatch.setattr(resumable, "READ_BATCH", 1)
    opened = []

    def read(file):
        opened.append(file)
        yield from (f"{file}{number}".encode() for number in range(9))

    files = tf.data.Dataset.from_tensor_slices(["a", "b", "a"]).interleave(
        resumable_reader(numbered_chunks(read)), cycle_length=2
    )
    whole = [x.item() for x in files.as_numpy_iterator()]
    assert sorted(whole) == sorted(f"{file}{number}".encode() for file in "aba" for number in range(9))
    assert opened == ["a", "b", "a"]  # and twice at once where two read it

    first, again = iter(files), iter(files)
    for _ in range(11):
        next(first)
    tf.train.Checkpoint(iterator=first).write(str(tmp_path / "position"))
    tf.train.Checkpoint(iterator=again).read(str(tmp_path / "position"))
    assert [x.numpy().item() for x in again] == whole[11:]

    failures = [OSError("not now")]

    def once(file):
        opened.append(file)
        for number in range(5):
            if number == 2 and failures:
                raise failures.pop()
            yield f"{number}".encode()

    dataset = resumable_reader(numbered_chunks(once))("c")
    with pytest.raises(tf.errors.OpError, match="not now"):
        list(dataset)
    assert len(list(dataset)) == 5  # a second time it is read to its end
    assert opened.count("c") == 2


def test_a_bad_line_of_json_is_a_sentence(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "all is well here"}\n' * 500 + "[1, 2]\n")
    files = TextFiles(train=str(tmp_path / "bad.jsonl"))
    with pytest.raises(UserError, match=r"not an object with a text under \"text\": b'\[1, 2\]'"):
        next(batches_of(small_config("files_full_lm", files=files, shards=1), "causal_decoder"))
    with pytest.raises(UserError, match="No file matches TextFiles.train"):
        batches_of(small_config("files_full_lm", files=TextFiles(train="nothing*.txt")), "causal_decoder")


def test_t5s_own_registrations_live_beside_ours_in_both_orders():
    """`t5.data.mixtures` registers the same names; importing it changes nothing for a run."""
    import t5.data.mixtures  # noqa: F401

    import t5x_lab.tasks  # noqa: F401

    assert "c4_v220_span_corruption" in seqio.TaskRegistry.names()
    for name in ("c4_v220_span_corruption", "c4_v220_full_lm", "c4_prefix_lm_objective_decoder_architecture"):
        assert name in tasks._text_task_names(tasks._TEXTS) and name in tasks.known_names()


def test_c4_is_read_through_tfds_in_the_version_that_is_prepared(tmp_path, monkeypatch):
    """A directory in TFDS's layout, made of 20 real C4 documents; version 2.2.0 is preferred, 3.1.0 otherwise."""
    source = shared_data("crawl", "trax_c4_tfrecord", "c4", "en", "2.3.0")
    import tensorflow_datasets as tfds

    from t5x_lab.tasks import c4

    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    with pytest.raises(UserError, match="neither c4/en:2.2.0 nor c4/en:3.1.0"):
        c4.prepared_version()
    features = tfds.features.FeaturesDict(
        {name: tfds.features.Text() for name in ("text", "url", "content-length", "content-type", "timestamp")}
    )
    for version in ("3.1.0", "2.2.0"):
        folder = tmp_path / "c4" / "en" / version
        folder.mkdir(parents=True)
        tfds.folder_dataset.write_metadata(
            data_dir=str(folder),
            features=features,
            split_infos=_copy_shards(source, folder, tfds),
            filename_template=None,
            check_data=False,
        )
        info = json.loads((folder / "dataset_info.json").read_text())
        (folder / "dataset_info.json").write_text(json.dumps({**info, "name": "c4", "configName": "en", "version": version}))
        assert c4.prepared_version() == version
    config = small_config("c4_v220_span_corruption", shards=1)
    try:
        batch = next(batches_of(config))
    finally:
        del tasks.find_members(config)[0].task.source.source  # other tests need C4 unprepared
    assert batch["encoder_input_tokens"].shape == (8, 32) and batch["encoder_input_tokens"].all()


def _copy_shards(source, folder, tfds):
    splits = []
    for split in ("train", "validation"):
        data = (source / f"c4-{split}.tfrecord-00000-of-00001").read_bytes()
        (folder / f"c4-{split}.tfrecord-00000-of-00001").write_bytes(data)
        count = sum(1 for _ in tf.data.TFRecordDataset(str(folder / f"c4-{split}.tfrecord-00000-of-00001")))
        template = tfds.core.ShardedFileTemplate(
            dataset_name="c4", split=split, filetype_suffix="tfrecord", data_dir=str(folder),
            template="{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
        )  # fmt: skip
        splits.append(tfds.core.SplitInfo(name=split, shard_lengths=[count], num_bytes=len(data), filename_template=template))
    return splits


def test_a_mixture_draws_from_its_tasks_at_their_rates(tmp_path):
    for letter in "ab":
        (tmp_path / f"{letter}.txt").write_text("\n".join([letter * 200] * 500))
    make = lambda letter: seqio.Task(
        f"only_{letter}", seqio.TextLineDataSource({"train": str(tmp_path / f"{letter}.txt")}),
        preprocessors=[lambda ds: ds.map(lambda line: {"targets": line}), seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
        output_features={"targets": seqio.Feature(VOCABULARY)},
    )  # fmt: skip
    for letter in "ab":
        seqio.TaskRegistry.add_provider(f"only_{letter}", make(letter))
    seqio.MixtureRegistry.add("three_to_one", [("only_a", 3.0), ("only_b", 1.0)])
    try:
        batches = batches_of(small_config("three_to_one", batch_size=16, pack=False), "causal_decoder")
        rows = np.concatenate([next(batches)["decoder_target_tokens"][:, 0] for _ in range(60)])
        share = float((rows == encode("a")[0]).mean())
        assert share == pytest.approx(0.75, abs=4 * (0.75 * 0.25 / len(rows)) ** 0.5)
    finally:
        seqio.MixtureRegistry.remove("three_to_one")
        for letter in "ab":
            seqio.TaskRegistry.remove(f"only_{letter}")


def test_reading_ends_at_once(text):
    """TensorFlow's tuning thread would sleep for up to a minute before the last batch's iterator is gone."""
    text("some words of a text " * 20)
    config = DataConfig("text_full_lm", {"targets": 64}, 2, ByteVocabulary(), shards=1)
    resolved = resolve_tasks(config, "causal_decoder", 384)
    training = SeqioBatches(resolved, config, seed=0)._datasets.values()
    evaluation = EvalBatches(resolved, resolved.components[0], config)._dataset()
    assert not any(dataset.options().autotune.enabled for dataset in (*training, evaluation))


def test_a_trained_sentencepiece_model_has_t5s_ids(tmp_path):
    texts = [f"the number {n} and the word w{n % 97} of the text" for n in range(3000)]
    train_sentencepiece(texts, "vocab.model", 200)
    vocabulary = build_vocabulary(SentencePieceVocabulary("vocab.model", extra_ids=100))
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.vocab_size) == (0, 1, 2, 300)
    assert vocabulary.decode(vocabulary.encode("the word w5 of the text")) == "the word w5 of the text"
    assert vocabulary.encode("<extra_id_0>")[-1] == 299
    with pytest.raises(UserError, match="cannot train 100000 pieces"):
        train_sentencepiece(texts, "other.model", 100_000)
    assert not pathlib.Path("other.model").exists() and not pathlib.Path("other.model.tmp").exists()


def test_byte_pairs_are_merged_by_their_numbers(tmp_path):
    """The first piece of several characters is the pair that stands beside each other most often, ids are T5's."""
    texts = [f"zq{'zq' * (n % 5)} ab{n % 7}" for n in range(500)]
    (tmp_path / "words.txt").write_text("\n".join(texts) + "\n")
    assert main(["vocab", f"--input={tmp_path}/words.txt", "--output=bpe.model", "--size=30", "--model_type=bpe"]) == 0
    model = sentencepiece.SentencePieceProcessor(model_file="bpe.model")
    assert (model.pad_id(), model.eos_id(), model.unk_id()) == (0, 1, 2) and model.get_piece_size() == 30
    assert model.id_to_piece(3) == "zq" and model.get_score(3) > model.get_score(4)


def test_a_vocabulary_of_a_mixture_samples_its_tasks_by_their_rates_and_reads_no_more_than_needed(tmp_path, capfd):
    """T5's mixture: ten parts English, one of German and of French. Records after the needed ones cannot be read."""
    for code in ("en", "de", "fr"):
        for part in range(4):
            lines = [json.dumps({"text": f"{code} text {part} {n} with the word {code}x{n % 50}"}) for n in range(3000)]
            (tmp_path / f"{code}{part}.jsonl").write_text("\n".join([*lines, "{broken"]))
    (tmp_path / "my_tasks.py").write_text(
        "import glob, seqio\nfrom t5x_lab.data.sources.text_files import document_files\n"
        "from t5x_lab.data.sources.file_types import FileType\nfrom t5x_lab.data.tasks.names import register_text\n"
        "for code in ('en', 'de', 'fr'):\n"
        f"    register_text(f'web_{{code}}', document_files({{'train': glob.glob(f'{tmp_path}/{{code}}*')}}, FileType('jsonl')))\n"
        "seqio.MixtureRegistry.add('web', [('web_en', 10), ('web_de', 1), ('web_fr', 1)])\n"
    )
    flags = ["--output=web.model", "--size=300", "--max_documents=1200", "--module=my_tasks"]
    try:
        assert main(["vocab", "--task=web", *flags]) == 0
        texts = list(tasks.sample_documents(DataConfig("web", {"targets": 1}, 1, ByteVocabulary(), shards=1), 1200))
    finally:
        seqio.MixtureRegistry.remove("web")
        for code in ("en", "de", "fr"):
            tasks.remove_text(f"web_{code}")
    lines = {"100 texts of web_de.", "1,000 texts of web_en.", "100 texts of web_fr."}
    assert lines <= set(capfd.readouterr().err.splitlines())
    counts = collections.Counter(tuple(text.split()[:3:2]) for text in texts)
    assert {code for code, _ in counts} == {"en", "de", "fr"} and sum(code == "en" for code, _ in counts) == 4
    assert [sum(n for (c, _), n in counts.items() if c == code) for code in ("en", "de", "fr")] == [1000, 100, 100]
    model = sentencepiece.SentencePieceProcessor(model_file="web.model")
    assert any("en" in model.id_to_piece(n) for n in range(300))


def test_the_tasks_of_a_vocabulary_share_one_tokenizer_of_tensorflow(monkeypatch):
    """A model of T5's size takes megabytes and tenths of a second, which a mixture of hundreds of tasks has once."""
    texts = [f"word w{n % 97} and number {n}" for n in range(3000)]
    train_sentencepiece(texts, "shared.model", 150)
    config = SentencePieceVocabulary("shared.model", extra_ids=10)
    tokenizers = []
    make = tf_text.SentencepieceTokenizer.__init__
    monkeypatch.setattr(
        tf_text.SentencepieceTokenizer, "__init__", lambda self, *a, **k: (tokenizers.append(1), make(self, *a, **k))[1]
    )
    vocabularies = [build_vocabulary(config) for _ in range(3)]
    assert vocabularies[0] == vocabularies[1] == seqio.SentencePieceVocabulary("shared.model", 10) == vocabularies[2]
    for vocabulary in vocabularies:
        encoded = tf.data.Dataset.from_tensor_slices(texts[:20]).map(vocabulary.encode_tf)
        decoded = encoded.map(vocabulary.decode_tf).as_numpy_iterator()
        assert [list(ids) for ids in encoded.as_numpy_iterator()] == [vocabulary.encode(text) for text in texts[:20]]
        assert [text.decode() for text in decoded] == texts[:20]
    assert len(tokenizers) == 1
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:  # as Beam's workers and users of Estimators have it
        ids = vocabularies[0].encode_tf(tf.constant(texts[5]))
        session.run(tf.compat.v1.tables_initializer())
        assert list(session.run(ids)) == vocabularies[0].encode(texts[5])


def test_the_t5_vocabulary_encodes_as_published():
    path = shared_data("t5_vocabulary", "sentencepiece.model")
    vocabulary = build_vocabulary(SentencePieceVocabulary(str(path)))
    ids = vocabulary.encode("Translate English to German: The house is wonderful.")
    assert ids == [30355, 15, 1566, 12, 2968, 10, 37, 629, 19, 1627, 5]
    assert vocabulary.vocab_size == 32_100 and vocabulary.encode("<extra_id_0>")[-1] == 32_099


def test_vocabularies_that_cannot_be_trained_with_are_named(tmp_path):
    """SentencePiece models without an EOS token, with sentinels of their own, with text under id 0, and of no bytes."""

    def check(name, extra_ids=0, **options):
        vocabulary = SentencePieceVocabulary(str(name), extra_ids=extra_ids)
        config = DataConfig("sotu_full_lm", {"targets": 16}, 2, vocabulary, shards=1, **options)
        check_vocabulary(resolve_tasks(config, "causal_decoder", 1_000), config, 1_000)

    models = shared_data("bug_inputs", "sentencepiece")
    (tmp_path / "empty.model").write_bytes(b"")
    for name, options, says in (
        (models / "gpt_like.model", {}, "has no EOS token"),
        (models / "mt5_marked.model", {"extra_ids": 100}, "has the sentinels <extra_id_0> and so on .*extra_ids = 0"),
        (models / "default_ids.model", {"pack": False}, "padded with id 0, which is a token"),
        (tmp_path / "empty.model", {}, "is not a SentencePiece model"),
    ):
        with pytest.raises(UserError, match=says):
            check(name, **options)
    check(models / "mt5_marked.model")
    check(models / "default_ids.model")
    assert build_vocabulary(SentencePieceVocabulary(str(models / "gpt_like.model"), extra_ids=0)).eos_id is None


def test_a_length_that_a_decoder_does_not_read_is_refused():
    """A row has the sum of both lengths, so that a length of inputs beside one of targets would be lost in silence."""
    resolve = lambda task, lengths, architecture: (
        resolve_tasks(DataConfig(task, lengths, 4, ByteVocabulary()), architecture, 384).lengths
    )
    both = {"inputs": 64, "targets": 32}
    for task, architecture in (("sotu_full_lm", "causal_decoder"), ("sotu_prefix_lm", "prefix_decoder")):
        with pytest.raises(UserError, match=r"rows would have 32 tokens, not 96\. Set for example '--gin.*\"targets\": 96"):
            resolve(task, both, architecture)
    assert resolve("sotu_prefix_lm", {"inputs": 64}, "prefix_decoder") == {"targets": 64}
    assert resolve("sotu_span_corruption", both, "causal_decoder") == both


def test_nightly_files_in_place_are_named_with_the_repair(monkeypatch):
    import seqio.version

    environment.check_environment()
    monkeypatch.setattr(seqio.version, "__version__", "0.0.18.dev20250227")
    with pytest.raises(UserError, match="builds over it. Repair it with: pip install --force-reinstall --no-deps"):
        environment.check_environment()
