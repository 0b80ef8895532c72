"""EAI-Eval's task files ask lm-eval what lm-eval of 2022 asked, and count as it counted."""

import json
import math
import random

import pytest
import yaml
from conftest import ROOT, shared_data

import t5x_lab
from t5x_lab.cli.main import main
from t5x_lab.evaluation.harness.random_baseline import chance
from t5x_lab.papers.eai_eval import NAME_PREFIX

FOLDER = ROOT / "t5x_lab" / "papers" / "eai_eval"
# Made-up records with the fields of each data set; what lm-eval 0.2.0 of March 2022, its own code, asked of them, and its
# accuracies with the scores of `made_up` for seeds 0 to 7.
THEIRS = json.loads((ROOT / "tests" / "data" / "lm_eval_2022.json").read_text())


def made_up(seed, context, continuation):
    """(log-probability with many ties, whether greedy decoding would write it), the same for the same texts."""
    drawn = random.Random(repr((seed, context, continuation)))
    return -float(drawn.randint(1, 3)), drawn.random() < 0.3


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def own_tasks_only(monkeypatch):
    """And not lm-eval's 14,000."""
    import functools

    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    monkeypatch.setattr(manager, "__init__", functools.partialmethod(manager.__init__, include_defaults=False))
    return manager


def test_there_are_31_tasks_and_their_splits_are_those_of_2022():
    group = yaml.safe_load((FOLDER / "eai_eval.yaml").read_text())
    names = [name.removeprefix("eai_") for name in group["task"]]
    assert len(names) == 31 and sorted(names) == sorted(THEIRS)
    assert group["aggregate_metric_list"] == [{"metric": "acc", "weight_by_size": False}]


def test_every_task_asks_and_counts_as_in_2022(offline, own_tasks_only, tmp_path):
    """All 31 through lm-eval itself, with their records in files, and eight seeds of made-up scores each."""
    import lm_eval
    from lm_eval.api.model import LM

    from t5x_lab.evaluation.harness.data_files import write_task_files
    from t5x_lab.evaluation.harness.model import add_random_baselines

    class Model(LM):
        seed, requests_seen = 0, []
        tokenizer_name = "none"

        def loglikelihood(self, requests, **unused):
            self.requests_seen += [(request.task_name, request.doc_id, *request.args) for request in requests]
            return [made_up(self.seed, *request.args) for request in requests]

        def loglikelihood_rolling(self, requests, **unused):
            raise NotImplementedError

        generate_until = loglikelihood_rolling

    for name, reference in THEIRS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in reference["records"]))
    (tmp_path / "tasks").mkdir()
    manager = own_tasks_only(include_path=str(FOLDER))
    write_task_files(str(tmp_path / "tasks"), manager.task_index, ["eai_eval"], [str(tmp_path / "{task}.jsonl")], NAME_PREFIX)
    manager = own_tasks_only(include_path=[str(FOLDER), str(tmp_path / "tasks")])
    tasks, model = manager.load(["eai_eval"])["tasks"], Model()
    for name, reference in THEIRS.items():
        task = tasks[f"eai_{name}"]
        assert reference["split"] == ("test" if task.has_test_docs() else "validation") or name == "lambada"
        for model.seed, expected in enumerate(reference["accuracies"]):
            model.requests_seen = []
            options = dict(task_dict={f"eai_{name}": task}, log_samples=True, bootstrap_iters=0)
            results = lm_eval.evaluate(lm=model, **options)
            assert results["results"][f"eai_{name}"]["acc,none"] == pytest.approx(expected, abs=1e-12), name
        by_doc = {}
        for _, doc, *pair in model.requests_seen:
            by_doc.setdefault(doc, set()).add(tuple(pair))
        expected_requests = [{tuple(pair) for pair in pairs} for pairs in reference["asked"]]
        assert [by_doc[number] for number in sorted(by_doc)] == expected_requests, name
        add_random_baselines(results, results["samples"])
        baseline = results["results"][f"eai_{name}"]["random_baseline,none"]
        counts = {len(pairs) for pairs in expected_requests}
        if name in ("lambada", "triviaqa", "webqs"):
            assert baseline == 0
        elif name != "multirc":
            assert baseline == pytest.approx(
                math.fsum(1 / len(pairs) for pairs in expected_requests) / len(expected_requests)
            ), counts


def test_chance_by_hand():
    """A choice of four, a question with three answers that count together, and an answer that is to be written."""
    assert chance([[(4, 1)], [(2, 1)] * 3, [(1, 0)]]) == (1 / 4 + 1 / 8) / 3


@pytest.mark.exhaustive
def test_real_records_give_what_an_independent_computation_gives(offline, own_tasks_only, tmp_path, monkeypatch, capsys):
    """RTE and MultiRC as SuperGLUE distributes them, by `t5x_lab harness`, and by `run.score` on prompts made here."""
    folder = shared_data("eval", "superglue")
    monkeypatch.chdir(tmp_path)
    run = t5x_lab.from_gin(
        ["models/t5_1_1/tiny.gin"], ["VOCABULARY = @ByteVocabulary()", "TransformerConfig.vocab_size = 384"], seed=1
    )
    run.save("run")
    data = [f"--data=rte={folder}/RTE/val.jsonl", f"--data=multirc={folder}/MultiRC/val.jsonl"]
    command = ["harness", "--model_dir=run", "--tasks=eai_rte,eai_multirc", "--json", "--limit=30", "--max_length=4096", *data]
    assert main(command) == 0
    results = json.loads(capsys.readouterr().out)["results"]

    records = [json.loads(line) for line in (folder / "RTE" / "val.jsonl").read_text().splitlines()[:30]]
    contexts = [f"{r['premise']}\nQuestion: {r['hypothesis']} True or False?\nAnswer:" for r in records for _ in range(2)]
    scores = run.score(contexts, [" True", " False"] * 30).reshape(-1, 2)
    labels = [["entailment", "not_entailment"].index(r["label"]) for r in records]
    assert results["eai_rte"]["acc,none"] == pytest.approx((scores.argmax(1) == labels).mean())
    assert results["eai_rte"]["random_baseline,none"] == 0.5

    answers = [
        (number, question["idx"], passage["text"], question["question"], answer)
        for number, line in enumerate((folder / "MultiRC" / "val.jsonl").read_text().splitlines())
        for passage in [json.loads(line)["passage"]]
        for question in passage["questions"]
        for answer in question["answers"]
    ][:30]
    contexts = [f"{text}\nQuestion: {question}\nAnswer:" for _, _, text, question, _ in answers for _ in range(2)]
    answer_prompts = [f" {a['text']}\nIs the answer correct? {word}" for *_, a in answers for word in ("yes", "no")]
    scores = run.score(contexts, answer_prompts).reshape(-1, 2)
    right, sizes = {}, {}
    for (number, question, *_, a), (yes, no) in zip(answers, scores, strict=True):
        right.setdefault((number, question), []).append((yes > no) == bool(a["label"]))
        sizes[number, question] = sizes.get((number, question), 0) + 1
    assert results["eai_multirc"]["acc,none"] == pytest.approx(sum(map(all, right.values())) / len(right))
    guessed = sum(0.5**size for size in sizes.values()) / len(sizes)
    assert results["eai_multirc"]["random_baseline,none"] == pytest.approx(guessed)


@pytest.mark.parametrize(
    "data, says",
    [
        (["{folder}/{{task}}.jsonl"], "30 of 31 tasks have no file. To run only the others, set --tasks=eai_rte"),
        (["rte={folder}/no.jsonl"], "there is no .*no.jsonl. 1 of 1 tasks have no file."),
        (["rte={folder}/rte.doc"], "rte.doc has an unsupported file type"),
        (["rtee={folder}/rte.jsonl"], '--data has a file for "rtee", which is not in --tasks. Did you mean "rte"'),
        (["rte"], '--data is "rte". Write TASK=PATH'),
    ],
)
def test_data_that_cannot_be_taken_are_said(data, says, own_tasks_only, tmp_path):
    from t5x_lab.config.errors import UserError
    from t5x_lab.evaluation.harness.data_files import write_task_files

    (tmp_path / "rte.jsonl").write_text("{}")
    (tmp_path / "rte.doc").write_text("{}")
    manager = own_tasks_only(include_path=str(FOLDER))
    with pytest.raises(UserError, match=says):
        write_task_files(
            str(tmp_path), manager.task_index, ["eai_eval"], [entry.format(folder=tmp_path) for entry in data], NAME_PREFIX
        )
