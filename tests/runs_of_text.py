"""Flags of small runs on real text, and what they logged."""

from t5x_lab.observe.metrics import read_metrics

TINY = [
    "--gin.VOCABULARY=@ByteVocabulary()", "--gin.TransformerConfig.vocab_size=384", "--gin.TransformerConfig.emb_dim=32",
    "--gin.TransformerConfig.mlp_dim=64", "--gin.TransformerConfig.head_dim=8", '--gin.TransformerConfig.dtype="float32"',
    "--gin.BATCH_SIZE=8", "--gin.DataConfig.shuffle_buffer_size=20", "--gin.DataConfig.eval_steps=2",
    "--gin.LearningRate.warmup_steps=1000", "--gin.DATA_SHARDS=1",
]  # fmt: skip
SPANS = ["--gin.MIXTURE_OR_TASK_NAME=sotu_span_corruption", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 24}']
FULL_LM = ["--gin.MIXTURE_OR_TASK_NAME=sotu_full_lm", '--gin.TASK_FEATURE_LENGTHS={"targets": 64}']
PREFIX_LM = [
    "--gin.MIXTURE_OR_TASK_NAME=sotu_prefix_lm_objective_decoder_architecture",
    '--gin.TASK_FEATURE_LENGTHS={"targets": 64}',
]
PREFIX_LM_ED = [
    "--gin.MIXTURE_OR_TASK_NAME=sotu_prefix_lm_objective_encoder_decoder_architecture", '--gin.TASK_FEATURE_LENGTHS={"inputs": 64, "targets": 64}',
]  # fmt: skip
MODELS = {
    "causal_decoder": ["--gin_file=models/decoder/tiny.gin"],
    "prefix_decoder": ["--gin_file=models/decoder/tiny.gin", "--gin.TransformerConfig.architecture=prefix_decoder"],
    "encoder_decoder": ["--gin_file=models/t5_1_1/tiny.gin"],
    "encoder": ["--gin_file=models/encoder/tiny.gin"],
    "gpt1": ["--gin_file=models/gpt1/tiny.gin"],
    "lstm": ["--gin_file=models/lstm/tiny.gin"],
    "rotary_decoder": ["--gin_file=models/rotary_decoder/tiny.gin"],
    "shared_stacks": ["--gin_file=models/shared_stacks/tiny.gin"],
}


def flags(architecture, objective, model_dir, steps, *more):
    return [
        "train",
        *MODELS[architecture],
        *objective,
        *TINY,
        f"--gin.MODEL_DIR={model_dir}",
        f"--gin.TRAIN_STEPS={steps}",
        *more,
    ]


def losses(model_dir, split="train"):
    return {
        line["step"]: (line["loss"], line.get("grad_norm"), line["raw_tokens"])
        for line in read_metrics(model_dir)
        if line["split"] == split
    }
