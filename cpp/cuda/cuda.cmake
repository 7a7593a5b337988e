# The CUDA backend, added to the module _jax_gg.

# Architectures: the GPUs in this machine, or else what a wheel is made for.
set(JAX_GG_CUDA_ARCHITECTURES "" CACHE STRING
    "Compute capabilities to build for, such as 80;90. Default: those of the GPUs here; without one, 80 and 90, and PTX for newer ones")
set(JAX_GG_CUDA_ARCHS ${JAX_GG_CUDA_ARCHITECTURES})
set(JAX_GG_CUDA_PTX OFF)
if(NOT JAX_GG_CUDA_ARCHS)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE JAX_GG_CUDA_ARCHS ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
  if(status EQUAL 0 AND JAX_GG_CUDA_ARCHS MATCHES "^[0-9.\n]+$")
    string(REPLACE "." "" JAX_GG_CUDA_ARCHS "${JAX_GG_CUDA_ARCHS}")
    string(REPLACE "\n" ";" JAX_GG_CUDA_ARCHS "${JAX_GG_CUDA_ARCHS}")
    list(REMOVE_DUPLICATES JAX_GG_CUDA_ARCHS)
  else()
    set(JAX_GG_CUDA_ARCHS 80 90)
    set(JAX_GG_CUDA_PTX ON)
  endif()
endif()
foreach(arch ${JAX_GG_CUDA_ARCHS})
  if(NOT arch MATCHES "^[0-9]+$" OR arch LESS 80)
    message(FATAL_ERROR "JAX_GG_CUDA_ARCHITECTURES holds '${arch}', expected compute capabilities of 80 or more, such as 80;90")
  endif()
endforeach()

# One front end pass serves all of them: the sm_80 kernels gain nothing from a newer virtual architecture.
list(TRANSFORM JAX_GG_CUDA_ARCHS PREPEND "sm_" OUTPUT_VARIABLE codes)
list(JOIN codes ", " JAX_GG_CUDA_BUILT_FOR)
if(JAX_GG_CUDA_PTX)
  list(APPEND codes compute_80)
  string(APPEND JAX_GG_CUDA_BUILT_FOR ", PTX of compute_80")
endif()
list(JOIN codes "," codes)
message(STATUS "jax_gg: CUDA kernels for ${JAX_GG_CUDA_BUILT_FOR}")

set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# CUTLASS is headers only. As a build requirement its package would bring 300 MB of others along; pip fetches it alone,
# from wherever pip is set up to look, and checks that it is the one that was tested.
set(JAX_GG_CUTLASS_INCLUDE "" CACHE PATH "Folder that holds cutlass/cutlass.h, of CUTLASS 4.2; default: fetched with pip")
set(JAX_GG_CUTLASS_INCLUDE_DIR ${JAX_GG_CUTLASS_INCLUDE})
if(NOT JAX_GG_CUTLASS_INCLUDE_DIR)
  set(cutlass ${CMAKE_CURRENT_BINARY_DIR}/cutlass)
  set(JAX_GG_CUTLASS_INCLUDE_DIR ${cutlass}/cutlass_library/source/include)
  if(NOT EXISTS ${JAX_GG_CUTLASS_INCLUDE_DIR}/cutlass/cutlass.h)
    file(WRITE ${cutlass}/requirements.txt "nvidia-cutlass==4.2.0.0 \
--hash=sha256:f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6\n")
    execute_process(
      COMMAND ${Python_EXECUTABLE} -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes
              --only-binary :all: --dest ${cutlass} --requirement ${cutlass}/requirements.txt
      RESULT_VARIABLE status)
    if(NOT status EQUAL 0)
      message(FATAL_ERROR "Could not fetch the CUTLASS headers with pip; set JAX_GG_CUTLASS_INCLUDE to those of CUTLASS "
                          "4.2, or JAX_GG_CUDA=OFF to build for the CPU only")
    endif()
    file(ARCHIVE_EXTRACT INPUT ${cutlass}/nvidia_cutlass-4.2.0.0-py3-none-any.whl DESTINATION ${cutlass}
         PATTERNS "cutlass_library/source/include/*")
  endif()
endif()
if(NOT EXISTS ${JAX_GG_CUTLASS_INCLUDE_DIR}/cutlass/cutlass.h)
  message(FATAL_ERROR "No cutlass/cutlass.h in '${JAX_GG_CUTLASS_INCLUDE_DIR}'; set JAX_GG_CUTLASS_INCLUDE")
endif()

include(cpp/cuda/sm80_kernels.cmake)
add_library(jax_gg_cuda OBJECT cpp/cuda/fill.cu ${JAX_GG_SM80_SOURCES})
target_include_directories(jax_gg_cuda PRIVATE cpp)
target_include_directories(jax_gg_cuda SYSTEM PRIVATE ${JAX_GG_CUTLASS_INCLUDE_DIR})
target_compile_options(jax_gg_cuda PRIVATE -O3 --expt-relaxed-constexpr "SHELL:-gencode arch=compute_80,code=[${codes}]")

include(cpp/cuda/sm90_kernels.cmake)
if(JAX_GG_SM90_SOURCES)
  add_library(jax_gg_sm90 OBJECT ${JAX_GG_SM90_SOURCES})
  target_include_directories(jax_gg_sm90 PRIVATE cpp)
  target_include_directories(jax_gg_sm90 SYSTEM PRIVATE ${JAX_GG_CUTLASS_INCLUDE_DIR})
  target_compile_options(jax_gg_sm90 PRIVATE -O3 --expt-relaxed-constexpr "SHELL:-gencode arch=compute_90a,code=sm_90a")
  target_sources(_jax_gg PRIVATE $<TARGET_OBJECTS:jax_gg_sm90> cpp/cuda/tensor_map.cc)
endif()

# The runtime is static and finds the driver when it is first called: the module imports on a machine without one.
target_sources(_jax_gg PRIVATE $<TARGET_OBJECTS:jax_gg_cuda> cpp/cuda/handlers.cc cpp/cuda/kernels.cc cpp/cuda/select.cc)
target_compile_definitions(_jax_gg PRIVATE JAX_GG_CUDA_BUILT_FOR="${JAX_GG_CUDA_BUILT_FOR}")
target_include_directories(_jax_gg PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/instances)
target_include_directories(_jax_gg SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
set_target_properties(_jax_gg PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES OFF)
