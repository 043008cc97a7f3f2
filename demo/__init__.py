"""A small base model, the LoRA adapters that give it skills, and the script that trained them."""
