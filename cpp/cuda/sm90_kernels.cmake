# The sm_90a kernels of a build: as sm80_kernels.cmake, with a source file for each tile and layout. Their steps along k are always 64.

set(JAX_GG_SM90_SOURCES "")
set(JAX_GG_SM90_INC "")

# DTYPES: pairs of operand and result. TILE: m n stages, m n of a cluster in tiles, whether warpgroups share a tile. RATE: as in sm80_kernels.cmake.
function(jax_gg_sm90)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "RATE" "LAYOUTS;DTYPES;TILE")
  string(REPLACE ";" "x" tile_name "${arg_TILE}")
  string(REPLACE ";" ", " tile "${arg_TILE}")
  foreach(layout ${arg_LAYOUTS})
    set(instances "")
    foreach(dtypes ${arg_DTYPES})
      string(REGEX MATCH "^(.*)-(.*)$" _ ${dtypes})
      set(in ${CMAKE_MATCH_1})
      set(out ${CMAKE_MATCH_2})
      string(APPEND JAX_GG_SM90_INC "JAX_GG_SM90(${arg_RATE}, k${layout}, k${in}, k${out}, ${tile})\n")
      string(APPEND instances
"template cudaError_t Launch<Layout::k${layout}, Dtype::k${in}, Dtype::k${out}, ${tile}>(
    const GroupedProblem&, void*, cudaStream_t);
")
    endforeach()
    set(source ${CMAKE_CURRENT_BINARY_DIR}/instances/sm90_${layout}_${tile_name}.cu)
    file(CONFIGURE OUTPUT ${source} CONTENT
"#include \"cuda/sm90.cuh\"

namespace jax_gg::cuda::sm90 {
${instances}}  // namespace jax_gg::cuda::sm90
")
    list(APPEND JAX_GG_SM90_SOURCES ${source})
  endforeach()
  set(JAX_GG_SM90_SOURCES ${JAX_GG_SM90_SOURCES} PARENT_SCOPE)
  set(JAX_GG_SM90_INC "${JAX_GG_SM90_INC}" PARENT_SCOPE)
endfunction()

if("90" IN_LIST JAX_GG_CUDA_ARCHS)
  set(same BF16-BF16 F16-F16)
  set(wide BF16-F32 F16-F32)
  # The best tile of most shapes.
  jax_gg_sm90(LAYOUTS NN NT TN DTYPES ${same} ${wide} RATE 770 TILE 128 256 4 1 1 true)
  # Where 192 divides n and 256 does not; the pair of blocks reads each row of lhs once for 384 columns.
  jax_gg_sm90(LAYOUTS NN NT DTYPES ${same} RATE 753 TILE 128 192 4 1 2 false)
  # For narrow weights.
  jax_gg_sm90(LAYOUTS NN NT TN DTYPES ${same} RATE 715 TILE 128 128 5 1 1 false)
  # For groups of up to 64 rows.
  jax_gg_sm90(LAYOUTS NN NT DTYPES ${same} ${wide} RATE 600 TILE 64 256 4 1 1 false)
endif()

file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/instances/sm90_kernels.inc CONTENT "${JAX_GG_SM90_INC}" @ONLY)
