"""Files of examples, and a small tokenizer with a chat template, in a folder."""

from __future__ import annotations

import json

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "fine, and you"},
    {"role": "user", "content": "fine"},
    {"role": "assistant", "content": "good"},
]


def made_tokenizer(folder, template=CHATML, special=()):
    """A folder with a byte-level tokenizer of 258 ids, and of special tokens beside those of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
        "chat_template": template,
    }
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def made_jsonl(path, records):
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path
