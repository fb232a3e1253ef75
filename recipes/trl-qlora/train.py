"""QLoRA of a language model with TRL, on unequal GPUs.

torchrun --nproc-per-node 2 train.py --model FOLDER_OR_NAME --data messages.jsonl --output_dir run
"""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from poplar.integrations.transformers import PoplarArguments, PoplarTrainerMixin


class PlannedTrainer(PoplarTrainerMixin, SFTTrainer): ...


@dataclass(kw_only=True)
class Job(PoplarArguments):
    model: str
    data: str


job, args = HfArgumentParser((Job, SFTConfig)).parse_args_into_dataclasses()

model = AutoModelForCausalLM.from_pretrained(
    job.model,
    dtype=torch.bfloat16,
    device_map={"": args.device},
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    ),
)
trainer = PlannedTrainer(
    model,
    args,
    train_dataset=load_dataset("json", data_files=job.data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(job.model),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    poplar=job,
)
trainer.train()
trainer.save_model()  # the adapters alone
