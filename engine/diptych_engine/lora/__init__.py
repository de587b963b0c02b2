"""LoRA adapters: low-rank changes of the model's projections, chosen per request.

`adapter` describes a request's adapter, `table` (in the core) knows which ones are loaded, `peft`
reads their files, and `bank` (in each worker) holds their tensors.
"""
