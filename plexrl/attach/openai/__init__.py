"""The OpenAI API for sampling, spoken by the job's own proxy and turned into samples of the pool.

Text lives here and nowhere else: the proxy renders chat templates, encodes and decodes, because that is the job's own
work on the job's own core. A slow template or a long prompt then stops neither the head nor other jobs, and head and
engine hosts see token ids as from the tinker SDK. Imported at the first request: most jobs never send one.
"""
