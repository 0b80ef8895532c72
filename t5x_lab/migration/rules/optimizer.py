"""The optimizer and its schedule."""

from t5x_lab.migration.project import Context
from t5x_lab.migration.statements import Binding, MacroReference, Reference, render
from t5x_lab.migration.steps import (
    DROPPED,
    KEPT,
    RENAMED,
    TO_DO,
    Rule,
    Step,
    configurable,
    dtype_as,
    gone,
    if_is,
    is_list,
    table,
    to,
    unneeded,
)

_OPTAX = {"adamw": "AdamW", "lion": "Lion", "sgd": "Sgd"}
_SCHEDULE_DEFAULTS = {"factors": "constant * linear_warmup * rsqrt_decay", "base_learning_rate": 0.5, "warmup_steps": 1000}


def optimizer(binding: Binding, context: Context) -> Step:
    value = binding.value
    if not isinstance(value, Reference):
        return Step(KEPT)
    selector, name = value.name.rpartition("/")[2], configurable(value)
    if context.is_own(selector):
        return Step(KEPT)
    if name == "MultiOptimizer":
        return _groups(context)
    scales = context.value("Adafactor.multiply_by_parameter_scale")
    if name == "Adafactor" and configurable(scales) == "HParamMap":
        return _groups_of_scales(context)
    equivalent = "Adafactor" if name == "Adafactor" else _OPTAX.get(name)
    if equivalent == "Adafactor" or (equivalent and value.is_call):
        lines = (f"OPTIMIZER = @{equivalent}()", *_optax_defaults(equivalent, None, context))
        return Step(RENAMED, lines, _DECAY.get(equivalent, ""))
    if name == "chain":
        return _chain(context)
    return Step(TO_DO, note=f"Choose an optimizer in place of @{selector} (docs/custom/optimizer.md)")


IN_GROUPS = ("ModelParamTraversal.filter_fn", "match_any.regexes")  # with any scope
_NAMES = "The names of some parameters differ here (docs/from_t5x.md); a pattern without parameters is refused at the start"


def _groups_of_scales(context: Context) -> Step:
    """`Adafactor.multiply_by_parameter_scale = @HParamMap()`: an optimizer for each pattern of parameter names."""
    rules = context.value("HParamMap.rules")
    if not is_list(rules) or not all(is_list(rule) and list(map(type, rule)) == [str, bool] for rule in rules):
        return Step(TO_DO, note="Bind Groups.groups to pairs of patterns and optimizers (docs/from_t5x.md)")
    names = {True: "@Adafactor()", False: "@unscaled/Adafactor()"}
    pairs = ", ".join(f"({render(_full(pattern))}, {names[value]})" for pattern, value in rules)
    lines = ("OPTIMIZER = @Groups()", f"Groups.groups = [{pairs}]", "unscaled/Adafactor.multiply_by_parameter_scale = False")
    return Step(RENAMED, lines, _NAMES)


def has_groups(context: Context) -> bool:
    """Returns whether the parts of MultiOptimizer become groups."""
    return _groups(context).status == RENAMED


def _groups(context: Context) -> Step:
    """MultiOptimizer with traversals by one regular expression each, or by several with `match_any`. Others are frozen."""
    groups = []
    pairs = context.value("MultiOptimizer.traversals_and_optimizers")
    for pair in pairs if is_list(pairs) else ():
        traversal, optimizer = map(context.resolve, pair) if is_list(pair) and len(pair) == 2 else (None, None)
        matcher = context.parameter(traversal, "filter_fn") if isinstance(traversal, Reference) else None
        regexes = context.parameter(matcher, "regexes") if isinstance(matcher, Reference) else None
        regexes = [context.resolve(each) for each in regexes] if is_list(regexes) else [None]
        is_known = configurable(traversal) == "ModelParamTraversal" and configurable(matcher) == "match_any"
        if not is_known or not all(isinstance(regex, str) for regex in regexes):
            return Step(TO_DO, note="Bind Groups.groups to pairs of patterns and optimizers (docs/from_t5x.md)")
        if not isinstance(optimizer, Reference) or configurable(optimizer) != "Adafactor":
            return Step(TO_DO, note=f"Bind Groups.groups: @{configurable(optimizer)} has no counterpart in a group")
        scope = optimizer.name.rpartition("/")[0]
        patterns = (render(_without_first_slash(regex)) for regex in regexes)
        groups += [f"({pattern}, @{f'{scope}/' if scope else ''}Adafactor())" for pattern in patterns]
    if not groups:
        return Step(TO_DO, note="Bind Groups.groups to pairs of patterns and optimizers (docs/from_t5x.md)")
    return Step(RENAMED, ("OPTIMIZER = @Groups()", f"Groups.groups = [{', '.join(groups)}, ('.*', None)]"), _NAMES)


def _without_first_slash(pattern: str) -> str:
    """Returns a pattern for names that do not begin with a slash, as they do in traversals of parameters."""
    return f"(.*/)?{pattern[3:]}" if pattern.startswith(".*/") else pattern.removeprefix("/")


def _full(pattern: str) -> str:
    """Returns a pattern that the full name has to match, in place of one that a part of the name may match."""
    start = "" if pattern.startswith(("^", ".*")) else ".*"
    end = "" if pattern.endswith(("$", ".*")) else ".*"
    return f"{start}{pattern}{end}"


def _scaled(binding: Binding, context: Context) -> Step:
    if configurable(context.resolve(binding.value)) == "HParamMap":
        return Step(DROPPED, note="The groups of OPTIMIZER have it")
    return to("Adafactor.multiply_by_parameter_scale")(binding, context)


def _factored(binding: Binding, context: Context) -> Step:
    if context.resolve(binding.value) is False:
        return Step(RENAMED, ("Adafactor.min_dim_size_to_factor = 1000000000  # no second moment is factored",))
    if context.differs(binding):
        return Step(RENAMED, ("Adafactor.min_dim_size_to_factor = 128",))
    return unneeded()


def _chain(context: Context) -> Step:
    """optax's chain of clipping and one optimizer."""
    transformations = context.value("chain.transformations") or []
    names = [configurable(each) for each in transformations if isinstance(each, Reference)]
    equivalent = [_OPTAX[name] for name in names if name in _OPTAX]
    others = [name for name in names if name not in (*_OPTAX, "clip_by_global_norm", "clip")]
    if len(equivalent) != 1:
        return Step(TO_DO, note="Choose an optimizer in place of the chain of optax (docs/custom/optimizer.md)")
    if names[-1] not in _OPTAX and "clip_by_global_norm" in names:
        return Step(TO_DO, note="Here gradients are clipped, before the optimizer, not updates after it")
    norm = context.value("clip_by_global_norm.max_norm") if "clip_by_global_norm" in names else None
    lines = [f"OPTIMIZER = @{equivalent[0]}()", *_optax_defaults(equivalent[0], norm, context)]
    if "clip" in names:
        lines.append(f"{equivalent[0]}.clip_value = {render(context.value('clip.max_delta'))}")
    if others:
        return Step(TO_DO, tuple(lines), f"{', '.join(others)} has no counterpart")
    return Step(RENAMED, tuple(lines), _DECAY.get(equivalent[0], ""))


_DECAY = dict.fromkeys(("AdamW", "Lion"), "Weight decay is of matrices alone here, not of the scales of norms")


def _optax_defaults(name: str, norm: float | None, context: Context) -> list[str]:
    """Returns the clipping of an optimizer, and optax's defaults that differ here."""
    if name == "Adafactor":
        return []
    decay = "AdamW.weight_decay = 0.0001  # optax's default"
    lines = [decay] if name == "AdamW" and "adamw.weight_decay" not in context.names else []
    return [f"{name}.clip_global_norm = {render(norm)}", *lines]


def _learning_rate_of(owner: str) -> Rule:
    """A schedule, or a number, as the learning rate of an optimizer of optax."""

    def rule(binding: Binding, context: Context) -> Step:
        value = context.resolve(binding.value)
        written = context.written(binding.value)
        if isinstance(value, int | float) or isinstance(written, MacroReference):
            scoped = f"{owner.lower()}/LearningRate"  # a run file may bind the schedule of the trainer
            bind = (f"{owner}.learning_rate = @{scoped}()", f'{scoped}.factors = "constant"')
            return Step(RENAMED, (*bind, f"{scoped}.base_learning_rate = {render(written)}"))
        name = configurable(value)
        if name == "create_learning_rate_scheduler":
            return Step(DROPPED, note="@LearningRate() is the schedule of every optimizer")
        if name == "warmup_cosine_decay_schedule":
            return Step(RENAMED, (f"{owner}.learning_rate = @CosineDecay()",))
        if isinstance(value, Reference) and context.is_own(value.name):
            return Step(RENAMED, (f"{owner}.learning_rate = {render(value)}",))
        return Step(TO_DO, note=f"Bind a schedule to {owner}.learning_rate (docs/custom/schedule.md)")

    return rule


def _schedule(binding: Binding, context: Context) -> Step:
    value = context.resolve(binding.value)
    name = configurable(value)
    if name and context.is_own(value.name):
        return Step(RENAMED, (f"LEARNING_RATE = {render(value)}",))
    if name == "create_learning_rate_scheduler":
        is_bound = any(bound.startswith(_SCHEDULE) for bound in context.names)
        if context.has_t5x_run or is_bound:
            return Step(DROPPED, note="@LearningRate() is the schedule of the run")
        return Step(RENAMED, _schedule_defaults(context))
    return Step(TO_DO, note="Bind LEARNING_RATE to a schedule (docs/custom/schedule.md)")


def _schedule_factor(binding: Binding, context: Context) -> Step:
    """The first of the parameters of T5X's schedule that is bound also writes its defaults that differ here."""
    parameter = binding.parameter
    lines = [f"LearningRate.{parameter} = {render(binding.value)}"]
    bound = [name for _, name in context.bindings if name.startswith(_SCHEDULE)]
    if bound and bound[0] == binding.name and not context.has_t5x_run:
        lines += _schedule_defaults(context)
    return Step(RENAMED, tuple(lines))


_SCHEDULE = "create_learning_rate_scheduler."


def _schedule_defaults(context: Context) -> tuple[str, ...]:
    """Returns T5X's defaults of the parameters of its schedule that nothing binds."""
    unbound = ((name, value) for name, value in _SCHEDULE_DEFAULTS.items() if f"{_SCHEDULE}{name}" not in context.names)
    return tuple(f"LearningRate.{name} = {render(value)}  # T5X's default" for name, value in unbound)


_FACTORS = "Second moments are factored by the axes of each parameter; Adafactor.min_dim_size_to_factor turns it off"
_WARM_UP = "The warm-up begins at 0"
_OWN_SCHEDULE = f"{_WARM_UP}. Write a schedule for another start (docs/custom/schedule.md)"
_PARAMETERS_OF_SCHEDULE = (
    "factors", "base_learning_rate", "warmup_steps", "decay_factor", "steps_per_decay", "steps_per_cycle", "step_offset",
    "min_learning_rate",
)  # fmt: skip
RULES = {
    **table(
        ("OPTIMIZER", optimizer),
        ("Adafactor.multiply_by_parameter_scale", _scaled),
        ("HParamMap.rules MultiOptimizer.traversals_and_optimizers", gone("Groups.groups has them")),
        ("Adafactor.factored", _factored),
        ("Adafactor.dtype_momentum", dtype_as("Adafactor.momentum_dtype")),
        (
            "Adafactor.logical_factor_rules",
            if_is("standard_logical_factor_rules", then="Factors follow the axes of parameters", otherwise=_FACTORS),
        ),
        ("chain.transformations clip_by_global_norm.max_norm clip.max_delta", gone("Its optimizer is OPTIMIZER")),
        ("Trainer.learning_rate_fn", _schedule),
        ("warmup_cosine_decay_schedule.init_value", if_is(0.0, 0, then=_WARM_UP, otherwise=_OWN_SCHEDULE)),
        *((f"create_learning_rate_scheduler.{name}", _schedule_factor) for name in _PARAMETERS_OF_SCHEDULE),
    ),
    **{
        key: rule
        for owner, equivalent in _OPTAX.items()
        for key, rule in table(
            (f"{owner}.learning_rate", _learning_rate_of(equivalent)),
            *((f"{owner}.{name}", to(f"{equivalent}.{name}")) for name in ("b1", "b2", "weight_decay", "momentum", "nesterov")),
            (f"{owner}.eps", to(f"{equivalent}.epsilon")),
        ).items()
    },
}
