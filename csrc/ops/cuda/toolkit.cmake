# What CMakeLists.txt asks of the CUDA toolkit. Needs no CUDA language.

set(POPLAR_OLDEST_NVCC 12.1) # its kernel parameter size is what pack needs

# Sets `result` to the version of an nvcc that is too old; empty: it is not, or this is no nvcc.
function(poplar_too_old_nvcc result compiler)
  execute_process(
    COMMAND "${compiler}" --version
    OUTPUT_VARIABLE printed
    ERROR_QUIET)
  set(version "")
  if(printed MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS POPLAR_OLDEST_NVCC)
    set(version "${CMAKE_MATCH_1}")
  endif()
  set(${result} "${version}" PARENT_SCOPE)
endfunction()

# Sets `result` to what CMAKE_CUDA_ARCHITECTURES compiles, separated by commas, named as
# torch.cuda.get_arch_list() names it: sm_86 is binary code, compute_86 is PTX.
function(poplar_architecture_names result architectures)
  if(architectures MATCHES "^(native|all|all-major)$") # CMake knows which those are
    string(TOUPPER "${architectures}" group)
    string(REPLACE "-" "_" group "${group}")
    set(architectures "${CMAKE_CUDA_ARCHITECTURES_${group}}")
  endif()
  set(names "")
  foreach(architecture IN LISTS architectures)
    string(REGEX REPLACE "-.*" "" number "${architecture}")
    if(NOT architecture MATCHES "-virtual$")
      list(APPEND names "sm_${number}")
    endif()
    if(NOT architecture MATCHES "-real$")
      list(APPEND names "compute_${number}")
    endif()
  endforeach()
  list(JOIN names "," names)
  set(${result} "${names}" PARENT_SCOPE)
endfunction()
