"""The real model directory: its tensors, its tokenizer, and that other engines read it alike."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
from pathlib import Path

import pytest

from specmeter.eagle.model_check import find_damage
from specmeter.eagle.model_store import ensure_model
from specmeter.eagle.model_wheel import SMOLLM2
from specmeter.eagle.tokenizer import Tokenizer
from tests.support.slow_bpe import SlowBpe

pytestmark = pytest.mark.engine

# SHA-256 of each tensor's bfloat16 bytes; compared once with transformers 5.19.0's own dequantization: all 272 equal.
HASHES = Path(__file__).parents[1] / "data" / "smollm2_tensor_sha256.json"

TEXTS = """
In 2023, 1234 apples|1|12|123|1234567890|3.14159|-1|$99.99|50%|1,000,000|0x1F|2+2=4|x2y3|a1b2c3|10 20 30|  7|7  8
2024-11-30T04:21:01Z|10:30|call 555-0199 now|v1.2.3|100km|1st 2nd 3rd|¼ ½ ²|Ⅷ|١٢٣|१२३|page 12.|(42)|[1, 2, 3]
Hello, world!|the|The|  two spaces|trailing |don't you've we'll I'd they're it's I'm|'s|'' '|DON'T
snake_case camelCase kebab-case|def f(x):\\n    return x ** 2\\n|for i in range(10):\\n\\tprint(i)\\n|a\\n\\n\\nb
\\t\\tx|nested(call(1, 2), 3)
\\n|   \\n  x|{"key": [1, 2.5, null]}|<html><body>hi</body></html>|https://example.com/a?b=1&c=2|me@example.com
naïve café résumé|Straße|Ελληνικά|Русский текст|中文字符测试|日本語のテキスト|한국어 2024년|עברית|العربية|हिन्दी
emoji 😀😃 👩‍👩‍👧|→ ← ≤ ≥ ≠|“quotes” ‘single’|…|—dash—|a\u00a0b|x\u2003y|\u0130stanbul|ﬁ|e\u0301
aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa|!!!???...|;;;|~`@#^&*|\\\\backslash\\\\|tab\\tafter 3\\t4|A1 B22 C333 D4444
<|im_start|>user\\nWhat is 17 * 23?<|im_end|>\\n<|im_start|>assistant\\n|<|endoftext|>x<|im_end|>|<|im_start |>
<repo_name>a/b|control \\x04\\x06 bytes|\\r\\nwindows 1\\r\\n|antidisestablishmentarianism 1989|Pneumonoultramicroscopic
the the  the   the|10  000
"""


def texts() -> list[str]:
    """The texts above; each line's end, where `|` stands inside <|...|>, is not a border."""
    out = []
    for line in TEXTS.strip().splitlines():
        guarded = line.replace("<|", "\0").replace("|>", "\1")
        out += [t.replace("\0", "<|").replace("\1", "|>") for t in guarded.split("|")]
    return [
        t.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r").replace("\\x04\\x06", "\x04\x06") for t in out
    ]


@pytest.fixture(scope="module")
def directory() -> Path:
    return ensure_model()


def test_every_tensor_is_the_one_that_was_compared_with_transformers(directory: Path) -> None:
    expected = json.loads(HASHES.read_text())
    with (directory / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        assert header.pop("__metadata__") == {"format": "pt"}
        found = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            found[name] = hashlib.sha256(file.read(end - begin)).hexdigest()
    assert len(found) == 272 and found == expected
    assert find_damage(SMOLLM2, directory, thorough=True) is None


def test_tokenizer_agrees_with_an_independent_bpe(directory: Path) -> None:
    model = json.loads((directory / "tokenizer.json").read_text())
    control = [entry["content"] for entry in model["added_tokens"]]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["model"]["merges"]]
    slow, fast = SlowBpe(model["model"]["vocab"], merges, control), Tokenizer(directory)
    assert len(texts()) >= 65 and len(control) == 17 and len(merges) == 48900
    differing = {t: (fast.encode(t), slow.encode(t)) for t in texts() if fast.encode(t) != slow.encode(t)}
    assert differing == {}


def test_known_ids(directory: Path) -> None:
    tokenizer = Tokenizer(directory)
    # Digits are 32 ("0") to 41 ("9"), one token each, with the space before a number a token of its own (216).
    assert tokenizer.encode("In 2023, 1234 apples") == [788, 216, 34, 32, 34, 35, 28, 216, 33, 34, 35, 36, 13855]
    assert tokenizer.encode("0123456789") == list(range(32, 42))
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.stop_ids == (2,)
    for text in texts():
        if "\x04" not in text:  # the vocabulary has no token for these bytes
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_chat_template(directory: Path) -> None:
    prompt = Tokenizer(directory).apply_chat_template([{"role": "user", "content": "Hi"}])
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert prompt == f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


OTHER = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}],
    add_generation_prompt=True, return_tensors="pt", return_dict=False)
answer = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1]:]
ids = [tokenizer.encode(text) for text in json.load(sys.stdin)]
print(json.dumps({"ids": ids, "answer": tokenizer.decode(answer), "dtype": str(model.dtype)}))
"""


def test_transformers_reads_the_directory_alike(directory: Path) -> None:
    python = os.environ.get("SPECMETER_VLLM_PYTHON")
    if not python:
        pytest.skip("SPECMETER_VLLM_PYTHON is not set: no environment with transformers")
    done = subprocess.run(
        [python, "-c", OTHER, str(directory)],
        input=json.dumps(texts()),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    tokenizer = Tokenizer(directory)
    assert result["ids"] == [tokenizer.encode(text) for text in texts()]
    assert result["answer"] == "The capital of France is Paris.<|im_end|>" and result["dtype"] == "torch.bfloat16"
