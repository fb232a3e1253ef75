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
