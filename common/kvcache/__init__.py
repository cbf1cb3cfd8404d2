"""Paged KV cache: layout, pool, page allocator, page tables, prefix cache (radix tree), partial pages."""
