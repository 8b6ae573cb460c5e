"""Files in, pages out, and what becomes of each page.

    sources: PATH... -> files           document: the bytes of a file -> pages, decoded one at a time
    ink, blank, split: what is on a page, whether it is empty, where a long one may be cut
    pages: one page -> engine requests -> PageResult, whoever runs the requests
    batch: many pages through an engine    records, folder: results as JSON and on disk

`kaminari read` and the HTTP route `/v1/ocr` are both made of `document` and `pages`; they differ in how they wait.
"""
