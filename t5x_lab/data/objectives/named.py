"""Objectives by name: Raffel et al. (2020), section 3.3, Wang et al. (2022), and Tay et al. (2022, UL2)."""

from t5x_lab.config.errors import UserError, did_you_mean
from t5x_lab.data.objectives.denoising import Denoisers, Denoising
from t5x_lab.data.objectives.language_modeling import FullLm, MaskedLm, PrefixLm
from t5x_lab.data.objectives.objective import Objective


def _ul2() -> Denoisers:
    """Returns UL2 (Tay et al. 2022, Table 1): R-denoisers, an S-denoiser (the last quarter), X-denoisers, with mode tokens."""
    settings = [("r", 3, 0.15), ("r", 8, 0.15), ("s", 1e9, 0.25), ("x", 3, 0.5), ("x", 8, 0.5), ("x", 64, 0.15), ("x", 64, 0.5)]
    return Denoisers(tuple((Denoising(rate, float(length), mode="rsx".index(kind)), 1.0) for kind, length, rate in settings))


OBJECTIVES: dict[str, Objective] = {
    "full_lm": FullLm(),
    "prefix_lm": PrefixLm(),
    "prefix_lm_objective_decoder_architecture": PrefixLm(for_encoder=False),
    "prefix_lm_objective_encoder_decoder_architecture": PrefixLm(for_encoder=True),
    "masked_lm": MaskedLm(),
    "bert_style": Denoising(0.15, inputs="random_or_sentinel", targets="whole"),
    "deshuffling": Denoising(1.0, inputs="permuted", targets="whole", merge_documents=False),
    "mass_style": Denoising(0.15, inputs="sentinel_per_token", targets="whole"),
    "replace_spans": Denoising(0.15),
    **{f"replace_spans_{rate}": Denoising(rate / 100) for rate in (10, 25, 50)},
    "drop_tokens": Denoising(0.15, inputs="without_noise", targets="noise_alone"),
    "span_corruption": Denoising(0.15, 3.0),
    **{
        f"span_corruption_{rate}_{length}": Denoising(rate / 100, float(length))
        for rate in (10, 15, 25, 50)
        for length in (2, 3, 5, 10)
    },
    "ul2": _ul2(),
}


def register_objective(name: str, objective: Objective) -> None:
    """Registers an objective for OBJECTIVE = "name" and for tasks "<text>_<name>"."""
    OBJECTIVES[name] = objective


def get_objective(objective: str | Objective) -> Objective:
    """Returns the objective of a name, or the objective itself.

    Raises:
      UserError: for an unknown name, with the nearest one.
    """
    if isinstance(objective, Objective):
        return objective
    if objective not in OBJECTIVES:
        raise UserError(
            f'OBJECTIVE is "{objective}".{did_you_mean(objective, OBJECTIVES)} Choose one of {", ".join(OBJECTIVES)}, or '
            "register your own with t5x_lab.data.objectives.register_objective in a module that a gin file imports."
        )
    return OBJECTIVES[objective]
