# Compile flags of the fused update, a file an instruction set. What must hold: the bits do not depend on the file.
# So no contraction of a product and a sum (the fused multiply-adds of divide.inl are asked for by name, and give the
# bits of a division), never -ffast-math. -fno-math-errno lets sqrt be one instruction, -fno-trapping-math lets
# branches become selects; neither changes a result.
set(jmo_kernel_flags -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math)
set(jmo_kernels ${CMAKE_CURRENT_LIST_DIR})
set_source_files_properties(${jmo_kernels}/run_baseline.cc ${jmo_kernels}/../update.cc
  ${jmo_kernels}/../../device/cell_update.cc
  PROPERTIES COMPILE_OPTIONS "${jmo_kernel_flags}")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(${jmo_kernels}/run_avx2.cc
    PROPERTIES COMPILE_OPTIONS "${jmo_kernel_flags};-mavx2;-mfma;-mf16c")
  set_source_files_properties(${jmo_kernels}/run_avx512.cc
    PROPERTIES COMPILE_OPTIONS "${jmo_kernel_flags};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mf16c;-mprefer-vector-width=512;-Wno-maybe-uninitialized")
endif()
