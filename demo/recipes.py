"""The LoRA configuration of each demo adapter. Together they cover the options of PEFT."""

from dataclasses import dataclass, field

from peft import LoraConfig

BASE_ID = "loraplex-demo"
"""The id of the base in the configs of the adapters. The base must be served under this id."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_ALL_LINEAR = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Recipe:
    """The LoRA shape of one adapter. `alpha` is PEFT's lora_alpha; patterns are PEFT's own."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...] = _ALL_LINEAR
    rslora: bool = False
    dora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None
    learning_rate: float = 5e-3
    max_steps: int = 400

    def lora_config(self) -> LoraConfig:
        """The PEFT configuration of this recipe."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=sorted(self.target_modules),
            use_rslora=self.rslora,
            use_dora=self.dora,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            layers_to_transform=None if self.layers is None else list(self.layers),
            bias="none",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
            base_model_name_or_path=BASE_ID,
        )

    def kind(self) -> str:
        """A few words on what is special about this adapter's configuration."""
        marks = ["rsLoRA"] * self.rslora + ["DoRA"] * self.dora
        marks += ["rank_pattern", "alpha_pattern"] * bool(self.rank_pattern)
        if self.layers is not None:
            marks.append(f"layers {self.layers[0]}-{self.layers[-1]}")
        return ", ".join(marks) or "plain"

    def targets(self) -> str:
        """The target modules in short: 'all linear' or 'q v'."""
        if self.target_modules == _ALL_LINEAR:
            return "all linear"
        return " ".join(name.removesuffix("_proj") for name in self.target_modules)


RECIPES: dict[str, Recipe] = {
    "reverse": Recipe(rank=16, alpha=32),
    "upper": Recipe(rank=8, alpha=16, target_modules=("q_proj", "v_proj")),
    "sort": Recipe(rank=32, alpha=8, rslora=True, learning_rate=4e-3, max_steps=500),
    "rot13": Recipe(rank=8, alpha=16, target_modules=_ATTENTION),
    "next": Recipe(rank=8, alpha=16, dora=True),
    "vowels": Recipe(rank=16, alpha=32, target_modules=("q_proj", "v_proj")),
    "mask": Recipe(rank=4, alpha=8, target_modules=("q_proj", "v_proj")),
    "digit-sum": Recipe(
        rank=8,
        alpha=16,
        rank_pattern={"down_proj": 16, r"layers\.0\.self_attn\.q_proj": 4},
        alpha_pattern={"down_proj": 16},
        max_steps=500,
    ),
    "twice": Recipe(rank=4, alpha=8),
    "stutter": Recipe(rank=16, alpha=16, layers=(0, 1, 2)),
}
"""One recipe for every skill, by the skill's name."""
