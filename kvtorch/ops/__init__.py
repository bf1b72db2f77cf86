"""Operations on planes: tensors and positions, never a pool. One file is one operation."""
