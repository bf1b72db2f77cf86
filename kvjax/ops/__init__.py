"""Operations on planes: arrays and positions, never a pool. One file is one operation."""
