"""A small Llama from scratch: Muon updates its matrices, AdamW the rest. On unequal GPUs.

torchrun --nproc-per-node 2 train.py --text corpus.txt
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import poplar

parser = argparse.ArgumentParser()
parser.add_argument("--text", required=True, help="its bytes are the tokens")
parser.add_argument("--context", type=int, default=512)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--global-batch", type=int, default=64)
args = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

torch.manual_seed(0)  # the same model on every rank
config = LlamaConfig(
    vocab_size=256,
    hidden_size=args.hidden,
    intermediate_size=4 * args.hidden,
    num_hidden_layers=args.layers,
    num_attention_heads=args.hidden // 64,
    max_position_embeddings=args.context,
)
model = LlamaForCausalLM(config).to(device)
tokens = torch.frombuffer(bytearray(Path(args.text).read_bytes()), dtype=torch.uint8).long()
dataset = TensorDataset(tokens[: len(tokens) // args.context * args.context].view(-1, args.context))


def loss_fn(model, batch):
    (tokens,) = batch
    tokens = tokens.to(device)
    return model(input_ids=tokens, labels=tokens).loss


matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
ours = set(matrices)
rest = [p for p in model.parameters() if p not in ours]
muon = {"params": matrices, "optimizer_class": torch.optim.Muon, "lr": 2e-2, "weight_decay": 0.1}
params = [muon, {"params": rest}]
# Muon needs whole matrices, which stage 3 cuts.
plan = poplar.autotune(model, loss_fn, dataset[:8], global_batch=args.global_batch, stage=2)
optimizer = poplar.HeteroZeroOptimizer(model, torch.optim.AdamW, plan=plan, params=params, lr=3e-4)
loader = DataLoader(dataset, batch_sampler=poplar.HeteroBatchSampler(len(dataset), plan))

for step, batch in enumerate(loader):
    result = optimizer.train_step(loss_fn, batch, max_norm=1.0)
    if dist.get_rank() == 0 and step % 10 == 0:
        print(f"step {step}: loss {float(result.loss):.4f}")

dist.destroy_process_group()
