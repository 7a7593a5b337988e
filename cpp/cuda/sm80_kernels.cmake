# The sm_80 kernels of a build. Writes instances/sm80_kernels.inc, one line a kernel, which the kernel table includes, and
# the source files that instantiate them, listed in JAX_GG_SM80_SOURCES: one for each tile, since reading CUTLASS's headers
# takes several times as long as one instantiation.

set(JAX_GG_SM80_SOURCES "")
set(JAX_GG_SM80_INC "")

# DTYPES: pairs of operand and result. TILE: m n k of a block, m n of each of its warps, stages. RATE: TFLOP/s on an H200
# in bf16 when all tiles are full and many; only ratios between tiles that serve the same operands matter.
function(jax_gg_sm80)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "MATH;ALIGNMENT;RATE" "LAYOUTS;DTYPES;TILE")
  string(REPLACE ";" "x" tile_name "${arg_TILE}")
  string(REPLACE ";" ", " tile "${arg_TILE}")
  set(instances "")
  foreach(layout ${arg_LAYOUTS})
    foreach(dtypes ${arg_DTYPES})
      string(REGEX MATCH "^(.*)-(.*)$" _ ${dtypes})
      set(in ${CMAKE_MATCH_1})
      set(out ${CMAKE_MATCH_2})
      string(APPEND JAX_GG_SM80_INC
             "JAX_GG_SM80(${arg_RATE}, k${layout}, k${in}, k${out}, k${arg_MATH}, ${arg_ALIGNMENT}, ${tile})\n")
      string(APPEND instances
"template cudaError_t Launch<Layout::k${layout}, Dtype::k${in}, Dtype::k${out}, Math::k${arg_MATH}, ${arg_ALIGNMENT}, ${tile}>(
    const GroupedProblem&, void*, cudaStream_t);
")
    endforeach()
  endforeach()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/instances/sm80_${arg_MATH}_a${arg_ALIGNMENT}_${tile_name}.cu)
  file(CONFIGURE OUTPUT ${source} CONTENT
"#include \"cuda/sm80.cuh\"

namespace jax_gg::cuda::sm80 {
${instances}}  // namespace jax_gg::cuda::sm80
")
  list(APPEND JAX_GG_SM80_SOURCES ${source})
  set(JAX_GG_SM80_SOURCES ${JAX_GG_SM80_SOURCES} PARENT_SCOPE)
  set(JAX_GG_SM80_INC "${JAX_GG_SM80_INC}" PARENT_SCOPE)
endfunction()

# Each tile is there for the groups that it is fastest for: 128 rows and more (the second where shared memory is less than
# 164 KB, or tiles are few), up to 64, up to 32, up to 16.
set(same BF16-BF16 F16-F16)
set(wide BF16-F32 F16-F32)
jax_gg_sm80(LAYOUTS NN NT DTYPES ${same} ${wide} MATH Tensor ALIGNMENT 8 RATE 490 TILE 128 256 64 64 64 3)
jax_gg_sm80(LAYOUTS NN NT DTYPES ${same} ${wide} MATH Tensor ALIGNMENT 8 RATE 475 TILE 128 128 64 64 64 3)
jax_gg_sm80(LAYOUTS NN NT DTYPES ${same} MATH Tensor ALIGNMENT 8 RATE 385 TILE 64 128 64 32 64 3)
jax_gg_sm80(LAYOUTS NN NT DTYPES ${same} ${wide} MATH Tensor ALIGNMENT 8 RATE 282 TILE 32 128 64 32 32 4)
jax_gg_sm80(LAYOUTS NN NT DTYPES ${same} MATH Tensor ALIGNMENT 8 RATE 153 TILE 16 128 64 16 32 5)
# Sums over rows fill the result with tiles of any size: one for large weights, one for small ones.
jax_gg_sm80(LAYOUTS TN DTYPES ${same} ${wide} MATH Tensor ALIGNMENT 8 RATE 482 TILE 128 128 32 64 64 4)
jax_gg_sm80(LAYOUTS TN DTYPES ${same} ${wide} MATH Tensor ALIGNMENT 8 RATE 303 TILE 64 64 64 32 32 4)
# Rows that begin at 4 bytes only.
jax_gg_sm80(LAYOUTS NN NT TN DTYPES ${same} ${wide} MATH Tensor ALIGNMENT 2 RATE 300 TILE 64 128 32 32 64 4)

foreach(alignment 4 1)
  jax_gg_sm80(LAYOUTS NN NT TN DTYPES F32-F32 MATH Tf32 ALIGNMENT ${alignment} RATE 200 TILE 128 128 16 64 64 4)
  jax_gg_sm80(LAYOUTS NN NT TN DTYPES F32-F32 MATH F32 ALIGNMENT ${alignment} RATE 80 TILE 128 64 16 64 32 4)
endforeach()
jax_gg_sm80(LAYOUTS NN NT TN DTYPES F32-F32 MATH Tf32 ALIGNMENT 4 RATE 130 TILE 64 64 32 32 32 4)

file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/instances/sm80_kernels.inc CONTENT "${JAX_GG_SM80_INC}" @ONLY)
