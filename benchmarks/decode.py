"""Decoding and scoring on a CPU, beside PyTorch's transformers with the same weights: T5 1.1 small, and a decoder of its size.

    pip install -e '.[compare]' && python benchmarks/decode.py [--rounds=5] [--only=speed|sharing|cost] [--layers=1]
        [--model=decoder]

speed: greedy tokens after prompts of 128, batch 1 and 32, float32: the time of the prompt with the first token, and of each
token after it. The sides take turns, each in a process of its own; both must write the same tokens. Medians.
sharing: four choices of each of 32 prompts scored with the prompt read once, and one by one.
cost: seconds a token as the cache fills up, drawn into docs/decoding_cost.png.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable

from turns import Worker, serve

PROMPT, TOKENS = 128, 64
START = 0  # start token of a decoder, which `Inference.generate` and transformers expect in the prompt
FILES = {"t5_1_1_small": "models/t5_1_1/small.gin", "decoder": "models/rotary_decoder/base.gin"}
COMMON = ["VOCABULARY = @ByteVocabulary()", 'TransformerConfig.dtype = "float32"']
SHAPES = {
    "t5_1_1_small": [],
    "decoder": [  # T5 1.1 small's encoder and decoder in one stack
        "TransformerConfig.emb_dim = 512", "TransformerConfig.num_heads = 8", "TransformerConfig.num_kv_heads = 8",
        "TransformerConfig.num_decoder_layers = 16", "TransformerConfig.mlp_dim = 1024",
    ],
}  # fmt: skip
PICTURE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "decoding_cost.png"


def prompts(batch: int, length: int = PROMPT):
    import numpy as np

    return np.random.default_rng(0).integers(300, 32_000, (batch, length))


def run_of(model: str, layers: int | None = None):
    """The model, with fewer layers for a trial of the benchmark itself."""
    import t5x_lab

    stacks = ("encoder", "decoder") if model.startswith("t5") else ("decoder",)
    fewer = [f"TransformerConfig.num_{stack}_layers = {layers}" for stack in stacks if layers]
    return t5x_lab.from_gin([FILES[model]], [*COMMON, *SHAPES[model], *fewer], seed=1)


def load_t5x_lab(folder: str, model: str):
    """f("batch tokens") -> JSON of [seconds, ids]."""
    import t5x_lab
    from t5x_lab.runs.model.inference import Inference

    run = t5x_lab.load(f"{folder}/{model}")
    inference = Inference(run.sharded)
    start = [] if run.has_encoder else [START]

    def answer(line: str) -> str:
        batch, tokens = map(int, line.split())
        texts = [start + prompt for prompt in prompts(batch).tolist()]
        began = time.perf_counter()
        generated = list(inference.generate(run.params, texts, limits=[tokens] * batch, eos_id=-1, batch_size=batch))
        seconds = time.perf_counter() - began
        return json.dumps([seconds, [ids.tolist() for _, ids, _ in sorted(generated, key=lambda text: text[0])]])

    return answer


def load_transformers(folder: str, model: str):
    import torch
    import transformers

    auto = transformers.AutoModelForSeq2SeqLM if model.startswith("t5") else transformers.AutoModelForCausalLM
    network = auto.from_pretrained(f"{folder}/{model}_hf", dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None

    def answer(line: str) -> str:
        batch, tokens = map(int, line.split())
        ids = torch.from_numpy(prompts(batch))
        if not model.startswith("t5"):
            ids = torch.nn.functional.pad(ids, (1, 0), value=START)
        began = time.perf_counter()
        with torch.inference_mode():
            generated = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, num_beams=1, use_cache=True
            )
        return json.dumps([time.perf_counter() - began, generated[:, -tokens:].tolist()])

    return answer


SIDES = {"t5x_lab": load_t5x_lab, "transformers": load_transformers}


def speed(rounds: int, folder: str, layers: int | None, models: Iterable[str]) -> None:
    from t5x_lab.cli.main import main as t5x_lab

    for model in models:
        run_of(model, layers).save(f"{folder}/{model}")
        t5x_lab(["convert", "--from=t5x_lab", "--to=hf", f"--source={folder}/{model}", f"--target={folder}/{model}_hf"])
        workers = {side: Worker(__file__, f"--side={side}", f"--model={model}", f"--folder={folder}") for side in SIDES}
        for batch in (1, 32):
            first, rest = ({side: [] for side in SIDES} for _ in range(2))
            for round_ in range(rounds + 1):
                ids = {}
                for side, worker in workers.items():
                    short, _ = json.loads(worker.ask(f"{batch} 1"))
                    whole, ids[side] = json.loads(worker.ask(f"{batch} {TOKENS + 1}"))
                    if round_:
                        first[side].append(short)
                        rest[side].append((whole - short) / TOKENS)
            actual, expected = (sum(ids[side], []) for side in SIDES)
            same = sum(a == b for a, b in zip(actual, expected, strict=True)) / len(actual)
            prompt, token = ({side: statistics.median(values[side]) for side in SIDES} for values in (first, rest))
            for side in SIDES:
                print(
                    f"{model:<13} batch {batch:<3} {side:<13} prompt {prompt[side]:.3f} s, token {1000 * token[side]:.1f} ms, "
                    f"{batch / token[side]:.0f} tokens/s"
                )
            print(
                f"{model:<13} batch {batch:<3} ours, times theirs: prompt {prompt['transformers'] / prompt['t5x_lab']:.2f}, "
                f"tokens/s {token['transformers'] / token['t5x_lab']:.2f}; {same:.1%} of the tokens are the same",
                flush=True,
            )
        for worker in workers.values():
            worker.close()


def sharing(rounds: int) -> None:
    import numpy as np

    for model in FILES:
        run, number = run_of(model), 32
        inputs = prompts(number, 256).tolist()
        choices = np.random.default_rng(1).integers(300, 32_000, (number, 4, 4)).tolist()

        def plain(run=run, inputs=inputs, choices=choices):
            return np.stack([run.scores(inputs, [four[i] for four in choices]).log_prob for i in range(4)], axis=1)

        def shared(run=run, inputs=inputs, choices=choices):
            return run.scores([text for text in inputs for _ in range(4)], sum(choices, []), batch_size=128).log_prob

        np.testing.assert_allclose(plain(), shared().reshape(number, 4), rtol=1e-3)
        seconds = {way: [timed(way) for _ in range(rounds)] for way in (plain, shared)}
        separate, together = (statistics.median(seconds[way]) for way in (plain, shared))
        print(
            f"{model:<13} 4 choices after 256 tokens: one by one {separate:.2f} s, "
            f"shared {together:.2f} s, {separate / together:.2f} times"
        )


def timed(f) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


def cost(rounds: int) -> None:
    import jax
    import matplotlib
    import numpy as np

    from t5x_lab.decoding.sampling import SamplingConfig
    from t5x_lab.runs.model.inference import Inference

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batch, most, chunk = 8, 512, 16
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    for model in FILES:
        run = run_of(model)
        inference = Inference(run.sharded)
        limit, stream = np.full((batch,), most, np.int32), np.arange(batch, dtype=np.int32)
        times = np.zeros((rounds, most // chunk))
        for round_ in range(-1, rounds):  # the first one compiles, and is written over
            ids = prompts(batch).astype(np.int32)
            slots = jax.block_until_ready(
                inference.start(run.params, ids, limit, stream, room=most, max_tokens=most, decoder_prefix=())
            )
            for i in range(most // chunk):
                began = time.perf_counter()
                args = (np.zeros((batch,), bool), np.uint32(0), np.int32(chunk), np.int32(batch))
                run_steps = inference.run_steps(run.params, slots, *args, config=SamplingConfig(), eos_id=-1)
                slots, _ = jax.block_until_ready(run_steps)
                times[round_, i] = (time.perf_counter() - began) / chunk
        median = np.median(times, axis=0)
        axes.plot((np.arange(most // chunk) + 0.5) * chunk, 1000 * median, label=model)
        early, late = median[: len(median) // 4].mean(), median[-len(median) // 4 :].mean()
        print(
            f"{model:<13} batch {batch}: "
            f"{1000 * early:.1f} ms a token in the first quarter of {most} tokens, {1000 * late:.1f} in the last"
        )
    axes.set(
        xlabel="tokens already written", ylabel="ms a token", ylim=(0, None), title=f"batch {batch}, a cache for {most} tokens"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("speed", "sharing", "cost"))
    parser.add_argument("--layers", type=int, help="layers of each stack with --only=speed (default: all)")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=FILES, help="one model alone with --only=speed (default: all)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(SIDES[args.side](args.folder, args.model))
        return
    if args.only in (None, "speed"):
        with tempfile.TemporaryDirectory() as folder:
            speed(args.rounds, folder, args.layers, [args.model] if args.model else FILES)
    if args.only in (None, "sharing"):
        sharing(args.rounds)
    if args.only in (None, "cost"):
        cost(args.rounds)


if __name__ == "__main__":
    sys.exit(main())
