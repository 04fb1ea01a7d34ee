"""The distributed training engine and the native trainer. Import from the subpackages."""

from d9d._installation import refuse_foreign_d9d

refuse_foreign_d9d()
