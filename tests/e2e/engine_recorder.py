# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Writes down what vLLM was asked and what it returned, at vLLM's own door, for the end-to-end tests.

verl imports this module in every process (`VERL_USE_EXTERNAL_MODULES`); it waits until vLLM's engine is imported and
wraps its `generate`. Nothing of the product is involved, so the record can contradict the ledger. The file is named by
the environment variable ENGINE_RECORD.
"""

import json
import os

import wrapt

_RECORD = os.environ.get("ENGINE_RECORD")


def _record_generate(module):
    generate = module.AsyncLLM.generate

    async def recorded(self, *args, **kwargs):
        last = None
        async for output in generate(self, *args, **kwargs):
            last = output
            yield output
        if last is not None:
            entry = {"prompt_ids": list(last.prompt_token_ids), "reply_ids": list(last.outputs[0].token_ids)}
            with open(_RECORD, "a") as file:
                file.write(json.dumps(entry) + "\n")

    module.AsyncLLM.generate = recorded


if _RECORD:
    wrapt.register_post_import_hook(_record_generate, "vllm.v1.engine.async_llm")
