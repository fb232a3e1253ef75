"""LoRA of Stable Diffusion's UNet with Accelerate, on unequal GPUs.

torchrun --nproc-per-node 2 train.py --model FOLDER_OR_NAME --images FOLDER --output run
"""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from transformers import CLIPTextModel, CLIPTokenizer

from poplar.integrations.accelerate import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--images", required=True, help="an image folder with metadata.jsonl (text)")
parser.add_argument("--output", required=True)
parser.add_argument("--resolution", type=int, default=512)
parser.add_argument("--batch", type=int, default=4, help="global batch / number of GPUs")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-4)
args = parser.parse_args()


@torch.no_grad()
def encoded(device):
    """The latents of the images and the embeddings of their captions, computed once."""
    vae = AutoencoderKL.from_pretrained(args.model, subfolder="vae").to(device)
    tokenizer = CLIPTokenizer.from_pretrained(args.model, subfolder="tokenizer")
    encoder = CLIPTextModel.from_pretrained(args.model, subfolder="text_encoder").to(device)
    latents, embeddings = [], []
    for row in load_dataset("imagefolder", data_dir=args.images, split="train"):
        pixels = VaeImageProcessor().preprocess(row["image"], args.resolution, args.resolution)
        latent = vae.encode(pixels.to(device)).latent_dist.mean
        latents.append(latent.cpu() * vae.config.scaling_factor)
        tokens = tokenizer(
            row["text"],
            padding="max_length",
            truncation=True,
            max_length=tokenizer.model_max_length,
            return_tensors="pt",
        )
        embeddings.append(encoder(tokens.input_ids.to(device))[0].cpu())
    return TensorDataset(torch.cat(latents), torch.cat(embeddings))


def loss_fn(unet, batch):
    latents, embeddings = batch
    noise = torch.randn_like(latents)
    steps = torch.randint(schedule.config.num_train_timesteps, latents.shape[:1])
    steps = steps.to(latents.device)
    predicted = unet(schedule.add_noise(latents, noise, steps), steps, embeddings).sample
    return mse_loss(predicted.float(), noise)


accelerator = Accelerator(mixed_precision="bf16", cpu=not torch.cuda.is_available())
dataset = encoded(accelerator.device)
schedule = DDPMScheduler.from_pretrained(args.model, subfolder="scheduler")
unet = UNet2DConditionModel.from_pretrained(
    args.model, subfolder="unet", torch_dtype=torch.bfloat16
).to(accelerator.device)
unet.requires_grad_(False)
torch.manual_seed(0)  # the same adapters on every rank
unet.add_adapter(LoraConfig(r=args.rank, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
cast_training_params(unet)  # adapters in fp32
unet.enable_gradient_checkpointing()
loader = DataLoader(dataset, args.batch, shuffle=True, drop_last=True)

unet, optimizer, loader, _ = prepare(
    accelerator, unet, torch.optim.AdamW, loader, loss_fn=loss_fn, lr=args.lr
)
torch.manual_seed(accelerator.process_index)  # other noise on every rank
unet.train()
for epoch in range(args.epochs):
    for batch in loader:
        result = optimizer.train_step(loss_fn, batch, max_norm=1.0)
    accelerator.print(f"epoch {epoch}: loss {float(result.loss):.4f}")

with optimizer.full_parameters():
    adapters = get_peft_model_state_dict(unet)
    if accelerator.is_main_process:
        StableDiffusionPipeline.save_lora_weights(args.output, unet_lora_layers=adapters)
