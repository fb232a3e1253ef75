"""Poplar inside other trainers. Each module needs the library it is named after; nothing is imported
before it is used.
"""
