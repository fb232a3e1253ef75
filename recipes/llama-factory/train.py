"""LLaMA-Factory's supervised fine-tuning on unequal GPUs: what `llamafactory-cli train` starts.

torchrun --nproc-per-node 2 train.py llama3_qlora.yaml
"""

from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

from poplar.integrations.transformers import PoplarTrainerMixin


class PlannedTrainer(PoplarTrainerMixin, workflow.CustomSeq2SeqTrainer): ...


workflow.CustomSeq2SeqTrainer = PlannedTrainer

if __name__ == "__main__":
    run_exp()
