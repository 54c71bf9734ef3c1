"""A server that samples from a transformers model in float32, one request at a time."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.weights.verify import add_tied_head, checksums

path, host, port = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
label = {"version": None}


def generate(token_ids, sampling, eos_ids, seed, **unused):
    temperature, random = sampling["temperature"], torch.Generator().manual_seed(seed % 2**63)
    sampled, log_probs, reason, cache, ids = [], [], "length", None, torch.tensor([token_ids])
    while len(sampled) < sampling["max_tokens"] and reason == "length":
        output = model(ids, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, -1].float()
        scores = torch.log_softmax(logits / (temperature or 1.0), -1)
        token = int(torch.multinomial(scores.exp(), 1, generator=random) if temperature else scores.argmax())
        sampled.append(token)
        log_probs.append(float(scores[token]) if temperature else 0.0)
        text = tokenizer.decode(sampled)
        reason = "eos" if token in eos_ids else "stop" if any(one in text for one in sampling["stop"]) else "length"
        ids = torch.tensor([[token]])
    spans = [(int(label["version"]), len(sampled))]
    return {"token_ids": sampled, "log_probs": log_probs, "finish_reason": reason, "version_spans": spans}


def score(token_ids):
    scores = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, :-1].float(), -1)
    return scores.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


def sums():
    return {name: (one.values, one.total) for name, one in add_tied_head(checksums(model.named_parameters())).items()}


def load(directory):
    for file in sorted(Path(directory).glob("*.safetensors")):
        model.load_state_dict(load_file(file), strict=False)  # a file holds a part of the parameters


CALLS = {
    "/health": dict,
    "/about": lambda: {"vocabulary": model.config.vocab_size, **label},
    "/checksums": sums,
    "/label": label.update,
    "/generate": generate,
    "/score": score,
    "/load": load,
}
one_at_a_time = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or "{}")
        with one_at_a_time, torch.no_grad():
            answer = json.dumps(CALLS.get(self.path)(**body)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST


ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
