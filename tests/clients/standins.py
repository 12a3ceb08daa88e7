"""Tiny local stand-ins for the models and data that clients take from the network, made in the folder they run in.

Libraries of Hugging Face look for a local folder of the given name before they use the network, so that
``from_pretrained("bert-base-cased")`` loads a folder ``bert-base-cased`` next to the script.
"""

import json
import random
import subprocess
import textwrap
from pathlib import Path

WORDS = tuple("abcdefghijklmnopqrst")


def bert_base_cased(folder: Path, python: Path) -> None:
    """``bert-base-cased``: 2 layers, hidden size 32, a vocabulary of a few words; weights from a fixed seed.

    The scripts that load it assert that training raises accuracy and F1, and alike in two ways. So that a few small
    steps do, the classifier begins at zero, a hair on the side of label 0, and the words of the two labels in
    :func:`mrpc` lie on two sides.
    """
    _bert(folder, python, sides=3.0)


def bert_of_two_sides(folder: Path, python: Path) -> None:
    """The same, with the two sides closer together: so it was tried under FSDP."""
    _bert(folder, python, sides=1.0)


def _bert(folder: Path, python: Path, *, sides: float) -> None:
    target = folder / "bert-base-cased"
    target.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocabulary += [f"[unused{index}]" for index in range(64 - len(vocabulary))]
    (target / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    (target / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 64}),
        encoding="utf-8",
    )
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "vocab_size": len(vocabulary),
        "initializer_range": 0.2,
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _with_weights(target, python, sides)


def mrpc(folder: Path, python: Path, *, train: int = 96, validation: int = 32) -> None:
    """``nyu-mll/glue``, configuration ``mrpc``: pairs of random sentences; the label is their set of words."""
    target = folder / "nyu-mll" / "glue"
    target.mkdir(parents=True)
    draw = random.Random(0)
    for split, rows in (("train", train), ("validation", validation)):
        lines = []
        for index in range(rows):
            words = WORDS[: len(WORDS) // 2] if index % 2 else WORDS[len(WORDS) // 2 :]
            first, second = (" ".join(draw.choices(words, k=draw.randint(4, 12))) for _ in range(2))
            row = {"sentence1": first, "sentence2": second, "label": index % 2, "idx": index}
            lines.append(json.dumps(row))
        (target / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (target / "README.md").write_text(
        textwrap.dedent(
            """\
            ---
            configs:
            - config_name: mrpc
              data_files:
              - split: train
                path: train.jsonl
              - split: validation
                path: validation.jsonl
            ---
            """
        ),
        encoding="utf-8",
    )


def glue_metric(folder: Path, python: Path) -> None:
    """The metric ``glue``, which ``evaluate`` loads: accuracy and F1 of its configuration ``mrpc``."""
    target = folder / "glue"
    target.mkdir()
    (target / "glue.py").write_text(
        textwrap.dedent(
            '''\
            """Accuracy and F1 of MRPC."""

            import datasets
            import evaluate


            class Glue(evaluate.Metric):
                def _info(self):
                    number = datasets.Value("int64")
                    features = datasets.Features({"predictions": number, "references": number})
                    return evaluate.MetricInfo(description="MRPC", citation="", features=features)

                def _compute(self, predictions, references):
                    pairs = list(zip(predictions, references))
                    both = sum(found == 1 and wanted == 1 for found, wanted in pairs)
                    one = sum((found == 1) + (wanted == 1) for found, wanted in pairs)
                    right = sum(found == wanted for found, wanted in pairs)
                    return {"accuracy": right / len(pairs), "f1": 2 * both / one if one else 0.0}
            '''
        ),
        encoding="utf-8",
    )


def small_esm2(folder: Path, python: Path) -> None:
    """The configuration of ESM-2 that a recipe brings along, in the size that the other ESM-2 clients have."""
    path = folder / "example_8m_checkpoint" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    path.write_text(json.dumps(config), encoding="utf-8")


_MAKE_CODONS = """
import json, numpy, pathlib, sys
folder = pathlib.Path(sys.argv[1])
draw = numpy.random.default_rng(0)
starts = numpy.arange(0, 40 * 128, 128)
sequences = draw.integers(5, 69, size=40 * 128).astype("uint8")
index = numpy.stack([starts, starts + 128, numpy.zeros(40, dtype=int)], axis=1).astype("int64")
sequences.tofile(folder / "sequences.mmap")
index.tofile(folder / "index.mmap")
described = {
    "chunks": [
        {
            "sequences": {"path": "sequences.mmap", "dtype": "uint8", "shape": list(sequences.shape)},
            "index": {"path": "index.mmap", "dtype": "int64", "shape": list(index.shape)},
        }
    ],
    "file_metadata": [{"file_name": "random.csv"}],
}
(folder / "metadata.json").write_text(json.dumps(described))
"""


def codons(folder: Path, python: Path) -> None:
    """A memory-mapped dataset of CodonFM: 40 sequences of 128 random codons."""
    target = folder / "standin_codons"
    target.mkdir()
    subprocess.run([str(python), "-c", _MAKE_CODONS, str(target)], check=True, capture_output=True)


_MAKE_WEIGHTS = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
model = getattr(transformers, config.architectures[0])(config)
with torch.no_grad():
    words = model.bert.embeddings.word_embeddings.weight[5:25]
    side = torch.randn(words.shape[1])
    words += float(sys.argv[2]) * torch.where(torch.arange(len(words)) < 10, 1.0, -1.0).outer(side)
    model.classifier.weight.zero_()
    model.classifier.bias.copy_(torch.tensor([1e-6, 0.0]))
model.save_pretrained(sys.argv[1])
"""


def _with_weights(model: Path, python: Path, sides: float) -> None:
    """Weights of the model that ``config.json`` describes, made in the client's environment."""
    subprocess.run([str(python), "-c", _MAKE_WEIGHTS, str(model), str(sides)], check=True, capture_output=True)
