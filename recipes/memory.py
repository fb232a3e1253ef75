"""Predicts the memory of a recipe by card pair: python recipes/memory.py trl-qlora.

State: the frozen base, and what is trained with its gradients and optimizer state. Stage 2 stores
a share of gradients and optimizer state, in proportion to the card; stage 3 also a share of the
parameters and of the base, and two unsharded blocks. A sample of a language model needs the inputs
of all blocks (gradient checkpointing), one recomputed block, and the logits with their gradient.
A plan leaves RESERVE of a card free. The CUDA context, about 0.5 GiB, is not counted.
"""

import sys
from dataclasses import dataclass

RESERVE, GIB = 0.05, 2**30
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)  # per block of 64 an 8-bit scale; per 256 scales a float


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, what of it is trained, and the cards. Numbers of parameters."""

    name: str
    quantised: float = 0.0
    frozen: float = 0.0  # in bf16
    trained: float
    parameter_bytes: int = 4  # of a trained parameter, in fp32
    state_bytes: int = 12  # its gradient and two moments
    blocks: int
    block_width: int = 0  # elements of a block's activations for each token
    hidden: int = 0
    vocabulary: int = 0
    tokens: int = 2048
    cards: tuple[tuple[int, ...], ...]  # GiB
    stages: tuple[int, ...] = (2, 3)

    def state(self, stage: int, share: float) -> float:
        base = self.quantised * NF4_BITS / 8 + 2 * self.frozen
        parameters = base + self.trained * self.parameter_bytes
        state = self.trained * self.state_bytes * (share if stage else 1)
        if stage == 3:
            return parameters * (share + 2 / self.blocks) + state
        return parameters + state

    def sample(self) -> float:
        per_token = 2 * (self.blocks * self.hidden + self.block_width) + 10 * self.vocabulary
        return self.tokens * per_token


LLAMA_8B = {"blocks": 32, "hidden": 4096, "block_width": 8 * 4096 + 4 * 14336}
QWEN_32B = {"blocks": 64, "hidden": 5120, "block_width": 8 * 5120 + 4 * 25600}
QLORA = (
    Job(
        name="Llama 3.1 8B",
        quantised=6.98e9,
        frozen=1.05e9,
        trained=42e6,
        vocabulary=128256,
        cards=((24, 12), (16, 8), (12, 12, 8)),
        **LLAMA_8B,
    ),
    Job(
        name="Qwen3 32B",
        quantised=31.2e9,
        frozen=1.56e9,
        trained=134e6,
        vocabulary=151936,
        cards=((48, 24), (24, 16)),
        **QWEN_32B,
    ),
)
RECIPES = {
    "trl-qlora": QLORA,
    "llama-factory": QLORA,
    "axolotl": QLORA,
    "diffusers-lora": (
        Job(
            name="Stable Diffusion 1.5",
            frozen=0.86e9,
            trained=3.2e6,
            blocks=25,
            cards=((24, 12), (8, 6)),
        ),
    ),
    "muon": (
        Job(
            name="Llama 1.1B",
            trained=1.1e9,
            parameter_bytes=2,
            state_bytes=12,  # gradient, fp32 master, momentum
            blocks=22,
            hidden=2048,
            block_width=8 * 2048 + 4 * 5632,
            vocabulary=32000,
            cards=((24, 16), (16, 8)),
            stages=(0, 2),
        ),
    ),
}


def rows(job: Job):
    """One line of the table for each set of cards and stage."""
    for cards in job.cards:
        for stage in job.stages:
            columns = []
            for card in cards:
                state = job.state(stage, card / sum(cards))
                room = card * (1 - RESERVE) * GIB - state
                text = f"{state / GIB:.1f} + {room / GIB:.1f}"
                if job.vocabulary:
                    text += f" ({int(room / job.sample())} samples)"
                columns.append(text if room > 0 else f"{state / GIB:.1f}: does not fit")
            names = " + ".join(map(str, cards))
            yield f"| {job.name} | {names} | {stage} | {'; '.join(columns)} |"


def main() -> None:
    """Print the table."""
    print("| model | cards (GiB) | stage | state + memory left on each card (GiB) |")
    print("|---|---|---|---|")
    for job in RECIPES[sys.argv[1]]:
        print("\n".join(rows(job)))


if __name__ == "__main__":
    main()
