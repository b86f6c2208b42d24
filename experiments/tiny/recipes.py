"""The two tiny models: their shapes, their seeds, their schedules."""

import math
from dataclasses import dataclass

from transformers import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One model: its shape, its seed, its schedule."""

    name: str
    seed: int
    layers: int
    hidden: int
    heads: int
    intermediate: int
    rope_theta: float
    steps: int
    learning_rate: float
    kv_heads: int = 2
    head_dim: int = 32
    positions: int = 1024
    tokens: int = 2048
    """Per step."""
    context: int = 512
    short_context: int = 256
    """Used first: attention costs half, and most of what there is to learn is near."""
    short_share: float = 0.6
    warmup: int = 100
    floor: float = 0.02
    """Final learning rate, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    every: int = 200
    """Steps between log lines, each with a checkpoint."""

    def length(self, step: int) -> int:
        """Tokens of a row at this step."""
        return self.short_context if step < self.short_share * self.steps else self.context

    def rate(self, step: int) -> float:
        """Learning rate at this step: linear up, then a cosine down."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / (self.steps - self.warmup)
        return self.learning_rate * (
            self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        )

    def config(self, *, vocabulary: int, end_of_text: int) -> LlamaConfig:
        """The architecture: plain Llama, plain RoPE, tied embeddings."""
        return LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.positions,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            pad_token_id=end_of_text,
        )


RECIPES = (
    Recipe(
        name="tiny-4l",
        seed=4,
        layers=4,
        hidden=128,
        heads=4,
        intermediate=384,
        rope_theta=10_000.0,
        steps=2600,
        learning_rate=3e-3,
    ),
    Recipe(
        name="tiny-6l",
        seed=6,
        layers=6,
        hidden=192,
        heads=6,
        intermediate=512,
        rope_theta=50_000.0,
        steps=2600,
        learning_rate=2e-3,
    ),
)
