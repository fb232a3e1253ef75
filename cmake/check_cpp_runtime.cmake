# Fails unless LIBRARY uses the shared libstdc++, as torch does. With a static copy, torch does not
# recognise the exceptions of the operators, and an operator that raises ends the process (SIGSEGV).
execute_process(
  COMMAND "${READELF}" --dynamic --wide "${LIBRARY}"
  OUTPUT_VARIABLE DYNAMIC_SECTION COMMAND_ERROR_IS_FATAL ANY)
if(NOT DYNAMIC_SECTION MATCHES "NEEDED[^\n]*libstdc\\+\\+\\.so")
  file(REMOVE "${LIBRARY}")
  message(
    FATAL_ERROR
      "${LIBRARY} does not use the shared libstdc++.so, which torch uses. An operator that raises "
      "would end the process. Remove -static-libstdc++ from the linker flags, or choose another "
      "compiler, for example CXX=/usr/bin/g++")
endif()
