"""kaminari_glmocr: the GLM-OCR plugin for kaminari, which registers no model yet."""
