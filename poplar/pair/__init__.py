"""`poplar pair`: the standard measurement of what unequal cards reach together.

Two sizes of a Llama, trained in full and by LoRA: Poplar's plan, an equal split, DDP and FSDP2 in
turns, each as a fraction of the sum of the cards' solo speeds.
"""
