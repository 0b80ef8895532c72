"""Mesh TensorFlow's own encoder-decoder: trains a small one and saves it, as T5's original releases were made.

    python mesh_tensorflow_model.py DIRECTORY 1.0|1.1

It writes the checkpoints of steps 3 and 4, with Adafactor's slots, and `values.npz`: a batch, and its logits at step 3.
"""

# ruff: noqa: E402  (Mesh TensorFlow is imported after TensorFlow has been prepared)
import math
import pathlib
import sys
import types

import numpy as np
import tensorflow
import tensorflow.compat.v1 as tf

# What Mesh TensorFlow's modules name, and TensorFlow no longer has. None of it is used here.
tf.estimator = tensorflow.estimator = types.SimpleNamespace(
    ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"),
    CheckpointSaverListener=object,
    SessionRunHook=object,
)
sys.modules["mesh_tensorflow.tpu_variables"] = types.ModuleType("mesh_tensorflow.tpu_variables")
tf.disable_v2_behavior()
tf.enable_resource_variables()  # whose values do not change while a step reads them

import gin
import mesh_tensorflow as mtf

package = types.ModuleType("mesh_tensorflow.transformer")  # without its `utils`, which need an estimator
package.__path__ = [str(pathlib.Path(mtf.__file__).parent / "transformer")]
sys.modules["mesh_tensorflow.transformer"] = package
import mesh_tensorflow.optimize
from mesh_tensorflow.transformer import transformer, transformer_layers  # noqa: F401  (registers layers with gin)

SIZES = {"vocab_size": 384, "emb_dim": 128, "num_heads": 4, "head_dim": 32, "mlp_dim": 256, "num_layers": 2}
INPUTS, TARGETS = 16, 8


def make_model(flavour: str) -> transformer.Bitransformer:
    is_1_0 = flavour == "1.0"
    norm, last_norm = ("sublayer_legacy_rms_norm", "sublayer_legacy_final_rms_norm") if is_1_0 else ("sublayer_rms_norm",) * 2
    attention = "".join(
        f"{name}.num_heads = {SIZES['num_heads']}\n{name}.key_value_size = {SIZES['head_dim']}\n"
        for name in ("SelfAttention", "EncDecAttention")
    )
    layers = "@SelfAttention, @DenseReluDense", "@SelfAttention, @EncDecAttention, @DenseReluDense"
    gin.parse_config(f"""{attention}
make_bitransformer.input_vocab_size = {SIZES["vocab_size"]}
make_bitransformer.output_vocab_size = {SIZES["vocab_size"]}
Unitransformer.d_model = {SIZES["emb_dim"]}
Unitransformer.max_length = 64
Unitransformer.positional_embedding = False
decoder/Unitransformer.shared_embedding_and_softmax_weights = {is_1_0}
make_layer_stack.num_layers = {SIZES["num_layers"]}
encoder/make_layer_stack.layers = [{layers[0]}]
decoder/make_layer_stack.layers = [{layers[1]}]
SelfAttention.relative_attention_type = "bias_shared"
DenseReluDense.hidden_size = {SIZES["mlp_dim"]}
DenseReluDense.activation = {"relu" if is_1_0 else ["gelu", "linear"]!r}
LayerStack.sublayers_initial = []
LayerStack.sublayers_per_layer = [@{norm}, @sublayer_call_layer, @sublayer_residual]
LayerStack.sublayers_final = [@{last_norm}]
""")
    return transformer.make_bitransformer()


def main(directory: str, flavour: str) -> None:
    rng = np.random.default_rng(0)
    inputs = rng.integers(2, SIZES["vocab_size"], (2, INPUTS))
    targets = rng.integers(2, SIZES["vocab_size"], (2, TARGETS))
    inputs[1, 10:], targets[1, 6:] = 0, 0

    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")

    def placed(tokens: np.ndarray) -> mtf.Tensor:
        shape = [mtf.Dimension("batch", 2), mtf.Dimension("length", tokens.shape[1])]
        return mtf.import_tf_tensor(mesh, tf.constant(tokens, tf.int32), mtf.Shape(shape))

    tf.train.get_or_create_global_step()
    model = make_model(flavour)
    with tf.variable_scope(""):
        logits, loss = model.call_simple(placed(inputs), placed(targets), compute_loss=True, mode="train")
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [variable.outputs[0] for variable in variables])
    optimizer = mesh_tensorflow.optimize.AdafactorOptimizer(learning_rate=0.01)
    updates = optimizer.apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl([], [], [""])})
    logits = lowering.export_to_tf_tensor(logits)
    step = tf.group([lowering.lowered_operation(update) for update in updates])
    with tf.control_dependencies([step]):
        step = tf.assign_add(tf.train.get_global_step(), 1)

    saved = tf.global_variables()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for variable in variables:
            size = variable.shape.size / variable.shape.dims[-1].size
            values = rng.normal(size=[d.size for d in variable.shape.dims]) / math.sqrt(size)
            master = next(each for each in saved if each.op.name == variable.name)
            master.load(values if "scale" not in variable.name else 1 + 0.1 * values, session)
        session.run(lowering.copy_masters_to_slices())
        for _ in range(3):
            session.run(step)
        saver = tf.train.Saver(saved)
        np.savez(f"{directory}/values.npz", inputs=inputs, targets=targets, logits=session.run(logits))
        for number in (3, 4):
            session.run(lowering.copy_slices_to_masters())
            saver.save(session, f"{directory}/model.ckpt", global_step=number)
            session.run(step)


if __name__ == "__main__":
    main(*sys.argv[1:])
