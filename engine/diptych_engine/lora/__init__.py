"""LoRA adapters: low-rank changes of the model's projections, chosen per request.

`adapter` says what an adapter is to a request, `table` (in the core) which ones are loaded, `peft`
reads their files, and `bank` (in each worker) holds their tensors.
"""
