"""Prefill on another server: K and V come over TCP, as codes, and go to rows of SGLang's KV pool.

SGLang's own disaggregation pairs the servers, and admits requests. This is one of its transfer
backends, after HACK (section 5.1) and Lynx (section 2.2).
"""
